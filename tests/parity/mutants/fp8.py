"""fp8: scales, formats and axes of quantization, in steps whose every other operation is in float64."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.nn import GELU, Linear, Module, Sequential

import jaxtrain
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.passes import Policy
from jaxtrain.passes.fp8 import delayed_scales, fp8_product, quantized_kernel, scaled_product
from jaxtrain.passes.fp8 import kernels as fp8_kernels
from jaxtrain.passes.fp8 import operands as fp8_operands
from jaxtrain.passes.fp8 import scales as fp8_scales
from jaxtrain.passes.fp8.scales import E4M3, Quantized
from jaxtrain.step import step
from parity.case import Batch, Case
from parity.mutate.mutant import Mutant, Patch, patched
from parity.settings import EXACT
from tests.parity.mutants.network import LR, SGD, normal

SIZES = (32, 256, 256, 16)
"""Of the hidden layer there are 2×2 blocks. The last layer is a head, which is not in fp8."""
ROWS = 32


def perceptron() -> Case:
    """Return a perceptron with a squared error, whose first two products are in fp8."""

    def torch_model() -> Module:
        layers = [Linear(n, m) for n, m in itertools.pairwise(SIZES)]
        with torch.no_grad():
            for layer in layers:  # rows, columns and blocks of magnitudes of their own
                layer.weight *= torch.linspace(0.1, 1, layer.out_features)[:, None]
                layer.weight *= torch.linspace(0.3, 1, layer.in_features)
        return Sequential(layers[0], GELU(), layers[1], GELU(), layers[2])

    def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        y = model(batch["x"])
        return ((y - batch["y"]) ** 2).sum(), len(y)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        del rng
        x = batch["x"]
        for name in ("first", "second"):
            x = jax.nn.gelu(x @ params[name]["kernel"] + params[name]["bias"][None], approximate=False)
        y = x @ params["head"]["kernel"] + params["head"]["bias"][None]
        return jaxtrain.Loss(((y - batch["y"]) ** 2).sum(), weight=len(y)), {}

    def batch(seed: int, rows: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {"x": normal(rng, (rows, SIZES[0])), "y": normal(rng, (rows, SIZES[-1]))}

    shapes = {
        name: {"kernel": jax.ShapeDtypeStruct((n, m), np.float32), "bias": jax.ShapeDtypeStruct((m,), np.float32)}
        for name, (n, m) in zip(_NAMES, itertools.pairwise(SIZES), strict=True)
    }
    names = {f"{name}/kernel": TorchParam(f"{module}.weight", LINEAR) for name, module in _NAMES.items()}
    names |= {f"{name}/bias": TorchParam(f"{module}.bias") for name, module in _NAMES.items()}
    return Case("perceptron", torch_model, torch_loss, loss_fn, shapes, NameTable(names), batch, ROWS, SGD, None)


_NAMES = {"first": 0, "second": 2, "head": 4}
"""PyTorch's modules by JAX's names."""


def quantized(name: str, patch: Patch, stage: str, torch: str = "", precision: str = "fp8", **settings: Any) -> Mutant:
    """The perceptron's step in fp8 with one part patched."""
    settings = {"precision": EXACT + precision, **settings}
    return Mutant(name, perceptron, perceptron, stage, torch, patch=patch, settings=settings)


@contextmanager
def _amax_of_the_kernel() -> Iterator[None]:
    """Scale the rows of a product by the largest magnitude of its kernel."""
    right = fp8_product.Product.forward

    def forward(self: Any, x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> Any:
        def quantize(of: jax.Array, dtype: Any, axes: tuple[int, ...], **options: Any) -> Quantized:
            wrong = kernel if of is x else of
            scale = fp8_scales.scale_of(jnp.max(jnp.abs(wrong), keepdims=True).reshape((1,) * of.ndim), dtype)
            return fp8_scales.scaled(of, dtype, scale)

        with mock.patch.object(fp8_operands, "quantize", quantize):
            return right(self, x, kernel, *bias)

    with mock.patch.object(fp8_product.Product, "forward", forward):
        yield


def _transposed_blocks(fp8: Any, kernel: jax.Array) -> Quantized:
    """Quantize the blocks of a kernel with the scales of the blocks of its transpose."""
    if len({*kernel.shape}) > 1:
        return _right_blocks(fp8, kernel)
    right = fp8_operands.quantize

    def quantize(blocks: jax.Array, dtype: Any, axes: tuple[int, ...], **options: Any) -> Quantized:
        scale = right(blocks, dtype, axes, **options).scale.transpose(2, 1, 0, 3)
        return fp8_scales.scaled(blocks, dtype, scale)

    with mock.patch.object(fp8_operands, "quantize", quantize):
        return _right_blocks(fp8, kernel)


_right_blocks = fp8_operands.quantized_blocks


def _ones_for_the_second(a_scale: jax.Array, b_scale: jax.Array, numbers: Any) -> tuple[jax.Array, jax.Array]:
    a_scale, b_scale = _right_aligned(a_scale, b_scale, numbers)
    return a_scale, jnp.ones_like(b_scale)


_right_aligned = scaled_product._aligned


def _other_axis(fp8: Any, kernel: jax.Array, axis: int) -> Quantized:
    """Quantize a kernel for a sum over one axis with the scales for a sum over the other."""
    right = fp8_scales.quantize(kernel, E4M3, (1 - axis,), power_of_two=True)
    # A product cannot take them out of its sum: it multiplies by those of the right axis.
    own = fp8_scales.quantize(kernel, E4M3, (axis,), power_of_two=True)
    return Quantized(right.data, own.scale)


def _late(fp8: Any, scale: jax.Array, history: jax.Array, amax: jax.Array) -> jax.Array:
    """Return the next scale without the largest magnitudes of the window that has just ended."""
    return _right_next(fp8, scale, history, jnp.zeros_like(amax))


_right_next = delayed_scales._next_scale


def _not_rolled(history: jax.Array, amax: jax.Array) -> jax.Array:
    """Write the newest magnitude over the one before."""
    return history.at[..., -1].set(amax)


@contextmanager
def _amax_of_the_input() -> Iterator[None]:
    """Record the largest magnitude of a product's input as that of its kernel."""
    right = fp8_product.Product.forward

    def forward(self: Any, *operands: jax.Array) -> Any:
        out, residuals = right(self, *operands)
        assert residuals.delayed is not None
        scale, (of_x, _) = residuals.delayed
        return out, residuals._replace(delayed=(scale, jnp.stack([of_x, of_x])))

    with mock.patch.object(fp8_product.Product, "forward", forward):
        yield


@contextmanager
def _copies_of_the_window_before() -> Iterator[None]:
    """Quantize kernels once a window from the parameters before the last update."""
    right, right_kernels = step.window_gradient, Policy.kernels

    def window_gradient(parts: Any, state: Any, *window: Any) -> Any:
        # The step of a check records the gradients of its last update, of SGD without momentum: NaN before the first.
        before = jax.tree.map(
            lambda x, grad: jnp.where(jnp.isfinite(grad), x + LR * grad, x), state.params, state.opt_state[0].grads
        )

        def kernels(*args: Any, **options: Any) -> Callable[..., Any]:
            copies = right_kernels(*args, **options)
            return lambda params, *rest: copies(before, *rest)

        with mock.patch.object(Policy, "kernels", kernels):
            return right(parts, state, *window)

    with mock.patch.object(step, "window_gradient", window_gradient):
        yield


def _unclipped(x: jax.Array, dtype: Any, scale: jax.Array, *, hides_inf: bool = True) -> Quantized:
    del hides_inf
    return Quantized((x.astype(np.float32) * scale).astype(dtype), scale)


def _any_scale(amax: jax.Array, dtype: Any, *, power_of_two: bool = False) -> jax.Array:
    del power_of_two
    return _right_scale(amax, dtype)


_right_scale = fp8_scales.scale_of
_none: Callable[[Any], Any] = lambda patterns: lambda path: False  # noqa: E731

MUTANTS = [
    quantized("fp8-amax-of-the-kernel", _amax_of_the_kernel, "forward", "0:"),
    quantized(
        "fp8-gradients-in-e4m3", patched(fp8_operands.gradient_format, lambda fp8: E4M3, within=fp8_product), "backward"
    ),
    quantized("fp8-left-scaled", patched(scaled_product._aligned, _ones_for_the_second), "forward", "0:"),
    quantized("fp8-head-in-8-bits", patched(fp8_kernels.Matching, _none, within=fp8_kernels), "forward", "4:"),
    quantized(
        "fp8-scale-not-a-power-of-two", patched(fp8_scales.scale_of, _any_scale), "forward", "0:", precision="fp8_row"
    ),
    quantized(
        "fp8-rows-of-the-transpose",
        patched(fp8_operands.kernel_along, _other_axis, within=quantized_kernel),
        "forward",
        "0:",
        precision="fp8_row",
    ),
    quantized(
        "fp8-blocks-transposed",
        patched(fp8_operands.quantized_blocks, _transposed_blocks, within=quantized_kernel),
        "forward",
        "2:",
        precision="fp8_block",
    ),
    quantized("fp8-kernels-of-the-window-before", _copies_of_the_window_before, "state", accumulate=2),
    quantized(
        "delayed-scale-one-update-late",
        patched(delayed_scales._next_scale, _late),
        "state",
        precision="fp8_delayed",
    ),
    quantized(
        "delayed-history-not-rolled", patched(delayed_scales._rolled, _not_rolled), "state", precision="fp8_delayed"
    ),
    quantized("delayed-amax-of-the-input", _amax_of_the_input, "state", precision="fp8_delayed"),
    quantized(
        "delayed-not-saturated",
        patched(fp8_scales.scaled, _unclipped, within=fp8_operands),
        "state",
        precision="fp8_delayed",
    ),
]
