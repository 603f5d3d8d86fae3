"""The product of activations with a parameter in 8 bits, with its derivative, as one primitive.

The numerics are those of torchao's `Float8Linear` ("tensor" and "row"; `matmul_with_hp_or_float8_args`) and
`Float8BlockwiseLinear` ("block"; `fp8_blockwise_mm`), with the bias added before the result is rounded. The backward
pass keeps the operands in 8 bits, each quantized along the axis that its product sums over.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.kernel_scales import KernelScales
from jaxtrain.passes.fp8.operands import Split, along_features, along_rows, by_given_scale, gradient_format, in_groups
from jaxtrain.passes.fp8.quantized_kernel import Gathering, QuantizedKernel, operand, quantize_kernel
from jaxtrain.passes.fp8.scaled_product import scaled_product
from jaxtrain.passes.fp8.scales import E4M3, Quantized, largest_magnitude
from jaxtrain.program.primitive import primitive

NAME = "fp8_product"


def fp8_product(
    x: jax.Array,
    kernel: jax.Array,
    *bias: jax.Array,
    fp8: Fp8,
    result: Any,
    scales: KernelScales | None = None,
    quantized: QuantizedKernel | None = None,
    gathering: Gathering | None = None,
) -> jax.Array:
    """Multiply rows with a parameter in 8 bits.

    Args:
      x: [..., K], with at least one axis of rows, in the compute dtype.
      kernel: [K, N], in the dtype of the parameter.
      *bias: At most one: [1, …, 1, N] in the compute dtype, added to the float32 sums.
      fp8: The settings.
      result: Dtype of the result: the compute dtype, or float32 for a product that is not rounded.
      scales: With the scaling "delayed", the scales of `x`, `kernel` and the gradient, float32[3].
      quantized: The kernel in 8 bits; None to quantize it here.
      gathering: How the kernel in 8 bits is gathered from other devices.

    Returns:
      [..., N]. The gradients by `x` and by `kernel` are products in 8 bits, rounded to the dtype of `x`; that by `bias`
      is summed in float32; that by the probe of `scales` is the largest magnitudes of `x`, `kernel` and the gradient.

    Example:
      >>> x, kernel = jnp.full((2, 16), 0.3, jnp.bfloat16), jnp.full((16, 16), 2.0)
      >>> fp8_product(x, kernel, fp8=Fp8(), result=jnp.bfloat16)[0, 0].item()
      9.625
    """
    operands = x, kernel, *bias, *(scales or ()), *jax.tree.leaves(quantized)
    params = {"fp8": fp8, "result": np.dtype(result), "is_copied": quantized is not None, "gathering": gathering}
    product: jax.Array = _primitive.bind(*operands, **params)
    return product


class Residuals(NamedTuple):
    """What the backward pass of a product keeps.

    Attributes:
      x: The rows, quantized along rows.
      kernel: The kernel, quantized along its columns, not gathered.
      delayed: With the scaling "delayed", the scale of the gradient, float32[], and the largest magnitudes of rows and
        kernel, float32[2]; else None.
    """

    x: Quantized
    kernel: Quantized
    delayed: tuple[jax.Array, jax.Array] | None = None


class Product(NamedTuple):
    """A product and its derivative.

    Attributes:
      fp8: The settings.
      result: Dtype of the result.
      operands: Shapes and dtypes of the rows, the kernel, the bias, if there is one, the two of the scales with the
        scaling "delayed", and the arrays of the quantized kernel if it is an operand.
      is_copied: Whether the quantized kernel is an operand.
      gathering: How the quantized kernel is gathered from other devices.
      split: Splits rows into groups, by which the gradients of kernel and bias are summed; None for one sum.
    """

    fp8: Fp8
    result: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    is_copied: bool = False
    gathering: Gathering | None = None
    split: Split | None = None

    @classmethod
    def of(cls, operands: Any, *, fp8: Fp8, result: Any, **options: Any) -> "Product":
        """Return the product of such operands."""
        return cls(fp8, result, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands), **options)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive."""
        return {name: getattr(self, name) for name in ("fp8", "result", "is_copied", "gathering")}

    @property
    def n_differentiated(self) -> int:
        """The number of operands with a gradient: rows, kernel and bias."""
        return len(self.operands) - 2 * self.fp8.is_delayed - self.n_copied

    @property
    def n_copied(self) -> int:
        """The number of arrays of the quantized kernel among the operands."""
        return (4 if self.fp8.scaling == "row" else 2 + self.fp8.is_delayed) if self.is_copied else 0

    def forward(self, x: jax.Array, kernel: jax.Array, *rest: jax.Array) -> tuple[jax.Array, Residuals]:
        """Return the product and what its derivative needs."""
        n = len(rest) - self.n_copied
        rest, copied = rest[:n], rest[n:]
        bias, scale = (rest[:-2], rest[-2]) if self.fp8.is_delayed else (rest, None)
        if self.is_copied:
            quantized = QuantizedKernel.joined(self.fp8, copied)
        else:
            quantized = quantize_kernel(self.fp8, kernel, None if scale is None else scale[1])
        amax = None if scale is None else _amax(x)  # before x is converted, for `fuse_casts`
        rows = along_features(self.fp8, x, E4M3) if scale is None else by_given_scale(x, E4M3, scale[0])
        out = self._by_features(rows, quantized.columns, 0, self.result, *bias)
        # One scale, whatever the sum is over, or others.
        of_x = in_groups(rows, self.split) if self.fp8.is_per_tensor else along_rows(self.fp8, x, E4M3, self.split)
        if scale is None or amax is None or quantized.amax is None:
            return out, Residuals(of_x, quantized.of_backward())
        return out, Residuals(of_x, quantized.columns, (scale[2], jnp.stack([amax, quantized.amax])))

    def backward(self, residuals: Residuals, gradient: jax.Array) -> tuple[Any, ...]:
        """Return the gradients by the operands; those by kernel and bias [groups, …] if rows are split."""
        x, kernel, *bias = self.operands[: self.n_differentiated]
        gradient = gradient.astype(x.dtype)
        dtype = gradient_format(self.fp8)
        of_scales = []
        if residuals.delayed is None:
            by_features = along_features(self.fp8, gradient, dtype)
        else:
            scale, amax = residuals.delayed
            of_scales = [jnp.zeros_like(scale, shape=(3,)), jnp.append(amax, _amax(gradient))]
            by_features = by_given_scale(gradient, dtype, scale)
        if self.fp8.is_per_tensor:
            by_rows = in_groups(by_features, self.split)
        else:
            by_rows = along_rows(self.fp8, gradient, dtype, self.split)
        of_x = self._by_features(by_features, residuals.kernel, 1, x.dtype)[..., : x.shape[-1]]
        of_kernel = self._by_rows(residuals.x, by_rows).astype(kernel.dtype)
        return of_x, of_kernel, *(self._sum(gradient, b.dtype) for b in bias), *of_scales, *[None] * self.n_copied

    def _by_features(self, rows: Quantized, kernel: Quantized, axis: int, result: Any, *bias: jax.Array) -> jax.Array:
        """Multiply rows with a kernel, of which an axis is summed over."""
        tiled = self.fp8.scaling == "block"
        numbers = (((rows.data.ndim - 1 - tiled,), (axis,)), ((), ()))
        n = self.operands[1].shape[1 - axis]
        kernel = _first(operand(self.fp8, kernel, axis, self.gathering), n, 1 - axis + tiled)
        return scaled_product(rows, kernel, numbers, result, *bias, tiled=tiled)

    def _by_rows(self, x: Quantized, gradient: Quantized) -> jax.Array:
        """Return the gradient by the kernel, in the dtype of the rows."""
        tiled = self.fp8.scaling == "block"
        groups = () if self.split is None else (0,)
        rows = tuple(range(len(groups), x.data.ndim - 1 - tiled))
        numbers = ((rows, rows), (groups, groups))
        return scaled_product(x, gradient, numbers, self.operands[0].dtype, tiled=tiled)

    def _sum(self, gradient: jax.Array, dtype: Any) -> jax.Array:
        """Return the gradient by the bias, summed in float32."""
        wide = gradient.astype(np.float32)
        axes = tuple(range(gradient.ndim - 1))
        if self.split is None:
            return wide.sum(axes, keepdims=True).astype(dtype)
        return self.split(wide).sum(tuple(axis + 1 for axis in axes), keepdims=True).astype(dtype)


def _amax(x: jax.Array) -> jax.Array:
    return largest_magnitude(x, tuple(range(x.ndim))).reshape(())


def _first(x: Quantized, n: int, axis: int) -> Quantized:
    """Return the first numbers along an axis: without those that fill the last tile."""
    return Quantized(*(part if part.shape[axis] == 1 else part[(slice(None),) * axis + (slice(n),)] for part in x))


def differentiable(product: Product) -> Any:
    """Return a product as a function of its operands with its derivative."""

    @jax.custom_vjp
    def multiply(*operands: jax.Array) -> jax.Array:
        multiplied: jax.Array = _primitive.bind(*operands, **product.params)
        return multiplied

    multiply.defvjp(lambda *operands: product.forward(*operands), product.backward)
    return multiply


def evaluate(*operands: jax.Array, **params: Any) -> jax.Array:
    """Compute a product by the operations that it consists of, from the primitive's operands and parameters."""
    return Product.of(operands, **params).forward(*operands)[0]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    out, tangent = jax.jvp(differentiable(Product.of(primals, **params)), tuple(primals), tuple(tangents))
    return out, tangent


_primitive = primitive(NAME, evaluate, jvp=_jvp)
