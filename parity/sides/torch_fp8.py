"""fp8 training in PyTorch: the reference of the policies "fp8", "fp8_delayed", "fp8_row" and "fp8_block".

"fp8" and "fp8_row" are torchao's recipes "tensorwise" and "rowwise", applied by `convert_to_float8_training`, as by its
users. A `Conv1D` of transformers, which torchao does not convert, calls the function that torchao's linear layer calls.
"fp8_block" has formulas of its own, because torchao's need a GPU; they are those of DeepSeek-V3 and of torchao.
"fp8_delayed" has those of TransformerEngine (`parity.sides.torch_delayed`).
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.nn import functional as F

from jaxtrain.errors import UserError
from jaxtrain.interop import TorchParam
from jaxtrain.passes import policy
from parity.case import Case
from parity.settings import fp8_policy
from parity.sides import torch_delayed

RECIPES = {"fp8": "tensorwise", "fp8_row": "rowwise"}
"""torchao's recipe of each policy that it has one for."""
DIVISOR = 16
"""The sizes of a layer in fp8 are multiples of it, as `torch._scaled_mm` requires."""
TILE = 128
EPS = 1e-12
"""Least magnitude of which a scale is computed, as in torchao."""

Product = Callable[[Tensor, Tensor], Tensor]
"""From x [..., K] and the transposed weight [K, N] to their product."""


def converted(case: Case, model: Module, precision: str) -> Module:
    """Let a model compute the products of its linear layers in fp8, where `precision` says so.

    Args:
      case: The case of the model, whose tables tell which layers the policy excludes.
      model: The model, with float32 or float64 parameters. It is changed.
      precision: One of `parity.settings.PRECISIONS`.

    Returns:
      The model; a new one if it is itself a linear layer. Its parameters and their names are the same.
    """
    name = fp8_policy(precision)
    if name is None:
        return model
    fits = partial(_fits, _excluded(case, name), _tables(model))
    for path, module in model.named_modules():
        if _is_conv1d(module) and fits(module, path):
            module.forward = partial(_conv1d, module, _product(name, module))
        elif name not in RECIPES and isinstance(module, Linear) and fits(module, path):
            module.forward = partial(_linear, module, _product(name, module))  # type: ignore[method-assign]
    if name in RECIPES:
        return _torchao().convert_to_float8_training(model, module_filter_fn=fits, config=_config(name))
    return model


@contextmanager
def autocast() -> Iterator[None]:
    """Autocast to bfloat16 on the CPU. torchao's layers ask for the state of CUDA's autocast only."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            # By which torchao asks.
            warnings.filterwarnings("ignore", r"torch\.get_autocast_gpu_dtype\(\) is deprecated", DeprecationWarning)
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@contextmanager
def scales_in_float64() -> Iterator[None]:
    """Let torchao round float64 scales down to powers of two, too."""
    from torchao.float8 import float8_utils

    name = "_round_scale_down_to_power_of_2"
    with mock.patch.object(float8_utils, name, lambda scale: torch.exp2(torch.floor(torch.log2(scale)))):
        yield


def _fits(excluded: Sequence[TorchParam], tables: frozenset[int], module: Any, path: str) -> bool:
    """Whether the product of a layer is computed in fp8."""
    divisible = all(size % DIVISOR == 0 for size in module.weight.shape)
    own = f"{path}.weight".lstrip(".")
    return divisible and id(module.weight) not in tables and not any(param.has(own) for param in excluded)


def _excluded(case: Case, name: str) -> list[TorchParam]:
    """The tensors whose products the policy excludes."""
    fp8, (names, _) = policy(name).fp8, case.tables
    assert fp8 is not None
    return [of for path, of in names.params.items() if any(fnmatchcase(path, pattern) for pattern in fp8.exclude)]


def _tables(model: Module) -> frozenset[int]:
    """The weights of embeddings; a layer that shares one is not in fp8."""
    return frozenset(id(module.weight) for module in model.modules() if isinstance(module, Embedding))


def _is_conv1d(module: Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _linear(layer: Any, product: Product, x: Tensor) -> Tensor:
    return _with_bias(product(_autocasted(x), layer.weight.t()), layer.bias)


def _conv1d(layer: Any, product: Product, x: Tensor) -> Tensor:
    return _with_bias(product(_autocasted(x), layer.weight), layer.bias)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _autocasted(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x


def _product(name: str, layer: Module) -> Product:
    """Return how a layer multiplies."""
    if name in RECIPES:
        return _torchao_product(_config(name))
    fp8 = policy(name).fp8
    assert fp8 is not None
    if not fp8.is_delayed:
        return _Blocks.apply
    scales = torch_delayed.with_scales(fp8, layer)

    def product(x: Tensor, weight_t: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch_delayed.Product.apply(x, weight_t, scales)

    return product


@cache
def _torchao() -> Any:
    """Import `torchao.float8`, which warns of what it cannot load."""
    try:
        logging.disable(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.float8
    except ModuleNotFoundError as missing:
        raise UserError("PyTorch's fp8 training needs torchao: pip install torchao") from missing
    finally:
        logging.disable(logging.NOTSET)
    return torchao.float8


def _config(name: str, *, emulate: bool = True) -> Any:
    """Return torchao's configuration. Emulated products equal those of `torch._scaled_mm` to the bit, and need no
    number of rows that 16 divides."""
    return dataclasses.replace(_torchao().Float8LinearConfig.from_recipe_name(RECIPES[name]), emulate=emulate)


def _torchao_product(config: Any) -> Product:
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    layer = Float8Linear(DIVISOR, DIVISOR, device="meta", config=config)
    return lambda x, weight_t: matmul_with_hp_or_float8_args.apply(x, weight_t, layer.linear_mm_config, config)


class _Blocks(torch.autograd.Function):
    """A product whose operands are quantized by tiles of 1×128 along the axis that is summed over, and the weight by
    blocks of 128×128: DeepSeek-V3, section 3.3.2; `fp8_blockwise_mm` of torchao."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor) -> Tensor:
        """Return x @ weight_t."""
        ctx.save_for_backward(x, weight_t)
        return _matmul(_tiles(_rows(x)), _squares(weight_t), x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both operands."""
        x, weight_t = ctx.saved_tensors
        rows = _rows(gradient)
        of_x = _matmul(_tiles(rows), _squares(weight_t).t(), x.dtype)
        of_weight = _matmul(_tiles(_rows(x).t()), _tiles(rows.t()).t(), x.dtype)
        return of_x.unflatten(0, x.shape[:-1]), of_weight


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, computed in the dtype of its operands and rounded to `dtype`."""
    with torch.autocast("cpu", enabled=False):
        return (a @ b).to(dtype)


def _tiles(x: Tensor) -> Tensor:
    """Quantize [M, K] by tiles of 1×128, and return the numbers that it stands for."""
    padded = F.pad(x, (0, -x.shape[1] % TILE)).unflatten(1, (-1, TILE))
    return _quantized(padded, (2,)).flatten(1)[:, : x.shape[1]]


def _squares(x: Tensor) -> Tensor:
    """Quantize [K, N] by blocks of 128×128, and return the numbers that it stands for."""
    height, width = x.shape
    padded = F.pad(x, (0, -width % TILE, 0, -height % TILE)).unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
    return _quantized(padded, (1, 3)).flatten(2).flatten(0, 1)[:height, :width]


def _quantized(x: Tensor, shared: tuple[int, ...]) -> Tensor:
    """Quantize to e4m3 with a scale for all elements along the axes `shared`."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    amax = x.abs().amax(shared, keepdim=True).to(torch.float64).clamp(min=EPS)
    scale = (largest / amax).to(torch.float32)
    return (x.float() * scale).clamp(-largest, largest).to(torch.float8_e4m3fn).float() / scale
