"""Constants that a PyTorch model computes when it is built, such as the frequencies of rotary embeddings, in float64.

`model.double()` keeps their rounding to float32, an error of 1e-8 that a JAX model which computes the same constants in
float64 does not have.
"""

from collections.abc import Callable, Collection, Iterator

import torch

from jaxtrain.errors import UserError
from parity.oracle.in_torch import InFloat64

ROUNDING = 1e-3
"""Largest difference, relative to the largest element, between a constant and its value computed in float64. A sine of
a large angle loses four digits in float32; a random buffer, drawn differently in float64, is at a distance of 1."""


def recompute_constants(
    model: torch.nn.Module, build: Callable[[], torch.nn.Module], keep: Collection[str] = ()
) -> tuple[str, ...]:
    """Replace the constants of a model by those that it would have if it had been built in float64.

    Args:
      model: The model. It is changed.
      build: Builds the model again.
      keep: Names of buffers that are not constants, such as running statistics.

    Returns:
      The names of the constants that changed; none if the model cannot be built in float64.

    Example:
      >>> class Frequencies(torch.nn.Module):
      ...     def __init__(self):
      ...         super().__init__()
      ...         inv_freq = 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
      ...         self.register_buffer("inv_freq", inv_freq, persistent=False)
      >>> model = Frequencies()
      >>> recompute_constants(model, Frequencies), float(model.inv_freq[1])
      (('inv_freq',), 0.1)
    """
    try:
        with InFloat64():
            exact = dict(_constants(build()))
    except UserError:
        return ()
    changed = []
    for name, (module, rounded) in [*_constants(model)]:
        if name not in keep and name in exact and _is_rounding(rounded, exact[name][1]):
            setattr(module, name.rpartition(".")[2], exact[name][1])
            changed.append(name)
    return tuple(changed)


def _constants(model: torch.nn.Module) -> Iterator[tuple[str, tuple[torch.nn.Module, torch.Tensor]]]:
    """Yield (name, (module, tensor)) of the floating tensors that are not trained."""
    for prefix, module in model.named_modules():
        plain = {key: x for key, x in vars(module).items() if isinstance(x, torch.Tensor)}
        for key, x in {**plain, **dict(module.named_buffers(recurse=False))}.items():
            if x.is_floating_point() and not x.requires_grad:
                yield f"{prefix}.{key}".lstrip("."), (module, x)


def _is_rounding(rounded: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `rounded` differs from `exact` by no more than the rounding of its computation."""
    if exact.dtype != torch.float64 or exact.shape != rounded.shape or not exact.numel():
        return False
    distance = (exact - rounded.double()).abs().max()
    return bool(0 < distance <= ROUNDING * exact.abs().max())
