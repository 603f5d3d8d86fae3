"""Kernels in 4 bits: NormalFloat with double quantization, as in QLoRA (Dettmers et al. 2023) and bitsandbytes.

A block of 64 weights is divided by its largest magnitude, and each weight is replaced by the nearest of 16 values, the
quantiles of a normal distribution. The magnitudes are quantized in turn: less their mean, in blocks of 256, to 8 bits.
That is 4.127 bits a weight.

A `QuantizedKernel` takes the place of a kernel in the parameters, which have to be frozen. It is dequantized where a
product needs it, in the forward pass and once more in the backward pass (`jaxtrain.models.parameter_forms`): where
layers are scanned, one layer at a time. Unrolled, a compiler may dequantize several early, and XLA:CPU does.

Blocks run along the inputs of every output, the layout of `torch.nn.Linear`, so that all bits are those of
bitsandbytes; only the mean of the magnitudes depends on the order in which a device sums.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.models.files.stored_arrays import read_arrays
from jaxtrain.models.parameter_forms import KernelForm, Product, evaluate, is_form
from jaxtrain.optim import SIGNED
from jaxtrain.paths import path_name
from jaxtrain.program.follow import used

BLOCK = 64
"""Number of weights that share a magnitude."""
MAGNITUDES_BLOCK = 256
"""Number of magnitudes that share a scale."""

VALUES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""The values of NF4 (appendix E of Dettmers et al. 2023)."""


DYNAMIC_VALUES = SIGNED.values
"""Values of the quantized magnitudes, relative to the scale of their block."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel(KernelForm):
    """A kernel, or a stack of kernels, in NF4.

    Rows are the outputs if the inputs are whole blocks; otherwise the whole kernel is one row.

    Attributes:
      packed: uint8 [..., rows, inputs / 2], two weights a byte, the first in the upper half.
      magnitudes: uint8 [..., rows, blocks], indices into `DYNAMIC_VALUES`.
      scales: float32 [..., ⌈rows · blocks / 256⌉], scales of the magnitudes.
      offset: float32 [...], mean of the magnitudes.
      inputs: Number of inputs.
      outputs: Number of outputs.
      kind: Dtype of the kernel.
      out_in: Whether the kernel stands for an array [out, in].
    """

    packed: Any
    magnitudes: Any
    scales: Any
    offset: Any
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})
    kind: Any = field(metadata={"static": True})
    out_in: bool = field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Dtype of the kernel."""
        return self.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        sizes = (self.outputs, self.inputs) if self.out_in else (self.inputs, self.outputs)
        return (*self.packed.shape[:-2], *sizes)

    @property
    def inputs_axis(self) -> int:
        """Axis of the inputs."""
        return int(self.out_in)

    def transpose(self) -> "QuantizedKernel":
        """Return the transposed kernel."""
        return replace(self, out_in=not self.out_in)

    def array(self) -> jax.Array:
        """Return the dequantized kernel."""
        for _ in self.packed.shape[:-2]:
            return lax.map(lambda kernel: kernel.array(), self)
        rows, n = len(self.packed), self.inputs * self.outputs // len(self.packed)
        values = jnp.pad(_unpack(self.packed)[:, :n], ((0, 0), (0, -n % BLOCK))).reshape(rows, -1, BLOCK)
        weights = (values * self._magnitudes()[..., None]).reshape(rows, -1)[:, :n]
        kernel = weights.astype(self.kind).reshape(self.outputs, self.inputs)
        return kernel if self.out_in else kernel.T

    def product(self, product: Product, x: jax.Array) -> tuple[jax.Array, None]:
        """Return x W. For the gradient of x the kernel is dequantized again."""
        return jax.checkpoint(lambda x, kernel: product(x, kernel.array()))(x, self), None

    def _magnitudes(self) -> jax.Array:
        """Return the magnitudes of the blocks, float32 [rows, blocks]."""
        relative = jnp.asarray(DYNAMIC_VALUES)[self.magnitudes.astype(np.int32)]
        scales = jnp.repeat(self.scales, MAGNITUDES_BLOCK)[: self.magnitudes.size].reshape(self.magnitudes.shape)
        return _rounded(relative * scales) + self.offset


@partial(jax.jit, static_argnames="out_in")
def quantize(kernel: jax.Array, *, out_in: bool = False) -> QuantizedKernel:
    """Quantize a kernel or a stack of kernels.

    Args:
      kernel: float [in, out], or [out, in], with a first axis for layers that are stacked. The layers are quantized one
        by one.
      out_in: Whether it is [out, in], as in `torch.nn.Linear`.

    Returns:
      The quantized kernel.

    Example:
      >>> kernel = quantize(jnp.linspace(-1, 1, 64 * 4).reshape(64, 4))
      >>> kernel.packed.shape, kernel.magnitudes.shape, kernel.shape
      ((4, 32), (4, 1), (64, 4))
      >>> bool(jnp.abs(kernel.array() - jnp.linspace(-1, 1, 64 * 4).reshape(64, 4)).max() < 0.16)
      True
    """
    if kernel.ndim == 3:
        return lax.map(partial(quantize, out_in=out_in), kernel)
    if kernel.ndim != 2 or not jnp.issubdtype(kernel.dtype, np.floating):
        raise UserError(f"quantize takes a kernel [in, out] of a linear layer, got {kernel.dtype}{list(kernel.shape)}")
    weights = kernel if out_in else kernel.T
    outputs, inputs = weights.shape
    rows = outputs if inputs % BLOCK == 0 else 1
    codes, magnitudes = _quantize_blocks(weights.astype(np.float32).reshape(rows, -1), BLOCK, VALUES)
    offset = _rounded(magnitudes.mean())
    indices, scales = _quantize_blocks((magnitudes - offset).reshape(1, -1), MAGNITUDES_BLOCK, DYNAMIC_VALUES)
    return QuantizedKernel(
        _pack(codes), indices.reshape(magnitudes.shape), scales[0], offset, inputs, outputs, kernel.dtype, out_in
    )


def quantize_params(params: Any, targets: str, *, out_in: str = "") -> Any:
    """Replace kernels by quantized ones.

    Args:
      params: Parameters of a model.
      targets: Regular expression that matches the whole paths of the kernels, as of `LoraConfig`.
      out_in: Regular expression that matches the whole paths of kernels stored [out, in].

    Returns:
      The parameters with a `QuantizedKernel` for every targeted kernel.

    Raises:
      UserError: `targets` match nothing, or a parameter that is not the kernel of a linear layer.

    Example:
      >>> params = {"fc": {"kernel": jnp.ones((64, 2)), "bias": jnp.zeros(2)}}
      >>> quantized = quantize_params(params, ".*/kernel")
      >>> sum(x.nbytes for x in jax.tree.leaves(quantized["fc"]["kernel"]))
      74
    """
    matched = [path for path, _ in _paths(params) if re.fullmatch(targets, path)]
    if not matched:
        kernels = ", ".join(path for path, leaf in _paths(params) if len(leaf.shape) > 1)
        raise UserError(f"the targets {targets!r} match no whole path: the model has {kernels}")

    def leaf(path: Any, x: Any) -> Any:
        name = path_name(path)
        return quantize(x, out_in=bool(re.fullmatch(out_in, name))) if name in matched else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def read_params(stored: Any, like: Any) -> Any:
    """Read stored parameters into their shards, some of them quantized: stacks of kernels one layer at a time.

    Args:
      stored: Pytree of arrays in files, as of `PretrainedModel.stored`.
      like: Shapes, dtypes and shardings of the results, with a `QuantizedKernel` of shapes for a quantized kernel, and
        with None for what is not read.

    Returns:
      The parameters, with None for None. A layer is quantized on the default device.

    Example:
      >>> stored = {"kernel": np.ones((2, 64, 3), jnp.bfloat16)}
      >>> like = jax.eval_shape(lambda: quantize_params({"kernel": jnp.ones((2, 64, 3))}, "kernel"))
      >>> read_params(stored, like)["kernel"].packed.shape
      (2, 3, 32)
    """

    def read(like: Any, array: Any) -> Any:
        return _read_quantized(array, like) if is_form(like) else read_arrays(array, like)

    return jax.tree.map(read, like, stored, is_leaf=lambda x: x is None or is_form(x))


def dequantize_params(params: Any) -> Any:
    """Return parameters with the array of every quantized kernel.

    Example:
      >>> params = {"kernel": jnp.ones((64, 2))}
      >>> dequantize_params(quantize_params(params, "kernel"))["kernel"].shape
      (64, 2)
    """
    return jax.tree.map(used, params, is_leaf=is_form)


def with_quantized(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `apply(params, *inputs)` for parameters with quantized kernels.

    `lora.with_adapters` takes them as they are.

    Example:
      >>> params = quantize_params({"kernel": jnp.ones((64, 2))}, "kernel")
      >>> with_quantized(lambda params, x: x @ params["kernel"])(params, jnp.ones((1, 64)))
      Array([[64., 64.]], dtype=float32)
    """

    def apply_quantized(params: Any, *inputs: Any) -> Any:
        return evaluate(lambda like: apply(like, *inputs), params, params)

    return apply_quantized


def sharding(rules: Mapping[str, P], *, out_in: str = "") -> dict[str, P]:
    """Return sharding rules of parameters with quantized kernels from the rules of the parameters.

    Weights and magnitudes are sharded as their kernel; its scales, a number for 16,384 weights, are not.

    Args:
      rules: Rules of the parameters.
      out_in: Regular expression that matches the whole paths of kernels stored [out, in].

    Example:
      >>> sharding({"fc/kernel": P("fsdp", "tensor")})["(fc/kernel)/(packed|magnitudes)"]
      P('tensor', 'fsdp')
    """
    found = {".*/(scales|offset)": P()}
    for pattern, spec in rules.items():
        if len(spec) < 2:
            continue
        *layers, n, m = spec
        if out_in:
            found[f"(?=({out_in})/[a-z]+$)({pattern})/(packed|magnitudes)"] = P(*layers, n, m)
        found[f"({pattern})/(packed|magnitudes)"] = P(*layers, m, n)
    return found | dict(rules)


def _paths(params: Any) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_form)]


def _read_quantized(stored: Any, like: QuantizedKernel) -> QuantizedKernel:
    if not jax.tree.leaves(like):
        return like
    whole = tuple(slice(None) for _ in stored.shape[-2:])

    def quantized(*layer: slice) -> Any:
        kernel = jnp.asarray(stored[*layer, *whole], like.dtype)
        return jax.device_get(quantize(kernel, out_in=like.out_in))

    if len(stored.shape) == 2:
        parts = quantized()
    else:
        layers = [quantized(slice(i, i + 1)) for i in range(stored.shape[0])]
        parts = jax.tree.map(lambda *x: np.concatenate(x), *layers)
    return jax.tree.map(read_arrays, parts, like)


def _quantize_blocks(rows: jax.Array, block: int, values: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return the index of the nearest value of every element [r, n], and the magnitudes of the blocks [r, n / block].

    The last block of a row may be shorter.
    """
    r, n = rows.shape
    blocks = jnp.pad(rows, ((0, 0), (0, -n % block))).reshape(r, -1, block)
    magnitudes = jnp.abs(blocks).max(-1)
    relative = blocks * (1 / jnp.maximum(magnitudes, 1e-38))[..., None]
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    indices = jnp.searchsorted(bounds, jnp.clip(relative, -1, 1), method="compare_all")
    return indices.astype(np.uint8).reshape(r, -1)[:, :n], magnitudes


def _rounded(product: jax.Array) -> jax.Array:
    """Return a product that is rounded before it is added to: compilers fuse both if nothing is between them."""
    return jnp.minimum(product, np.finfo(np.float32).max)


def _pack(codes: jax.Array) -> jax.Array:
    """Return two codes a byte, along the last axis; an odd one is followed by that of 0."""
    pairs = jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2)), constant_values=7).reshape(len(codes), -1, 2)
    return (pairs[..., 0] << 4) | pairs[..., 1]


def _unpack(packed: jax.Array) -> jax.Array:
    """Return the values of packed codes, float32."""
    codes = jnp.stack([packed >> 4, packed & 15], axis=-1).reshape(len(packed), -1)
    return jnp.asarray(VALUES)[codes.astype(np.int32)]
