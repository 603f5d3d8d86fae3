"""Caches of functions, which keep tensors of one precision for a run in another."""

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

_LRU_CACHE = type(functools.lru_cache(lambda: None))


def clear_caches(model: torch.nn.Module) -> None:
    """Clear the `functools.lru_cache`s of the source files that define a model's modules.

    Several models of transformers cache tensors, of coordinates for example, by arguments that do not tell a float32
    run from a float64 one.

    Args:
      model: The model.

    Example:
      >>> from transformers.models.dinov3_vit import modeling_dinov3_vit
      >>> cached = modeling_dinov3_vit.get_patches_center_coordinates
      >>> cached(2, 2, dtype=torch.float32, device="cpu").dtype
      torch.float32
      >>> with torch.device("meta"):
      ...     model = modeling_dinov3_vit.DINOv3ViTModel(modeling_dinov3_vit.DINOv3ViTConfig(num_hidden_layers=1))
      >>> clear_caches(model)
      >>> [cache.cache_info().currsize for cache in caches_of(modeling_dinov3_vit)]
      [0]
    """
    defined_in = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for name in defined_in:
        if name in sys.modules and name.partition(".")[0] != "torch":
            for cache in caches_of(sys.modules[name]):
                cache.cache_clear()


def caches_of(module: ModuleType) -> Iterator[Any]:
    """Yield the caches of a source file's functions and methods."""
    for value in vars(module).values():
        yield from _caches_of(value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for method in vars(value).values():
                yield from _caches_of(method)


def _caches_of(function: Any) -> Iterator[Any]:
    """The cache that a function is, or that a decorator wrapped it in."""
    if isinstance(function, _LRU_CACHE):
        yield function
    elif isinstance(function, FunctionType):
        yield from (cell.cell_contents for cell in function.__closure__ or () if _is_cache(cell))


def _is_cache(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, _LRU_CACHE)
    except ValueError:  # an empty cell
        return False
