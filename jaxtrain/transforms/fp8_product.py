"""The product of activations with a parameter in 8 bits, with its derivative, as one primitive.

The numerics are those of torchao's `Float8Linear` ("tensor" and "row"; `matmul_with_hp_or_float8_args`) and
`Float8BlockwiseLinear` ("block"; `fp8_blockwise_mm`), with the bias added before the result is rounded. The backward
pass keeps the operands in 8 bits, each quantized along the axis that its product sums over.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxtrain.transforms.fp8 import Fp8
from jaxtrain.transforms.fp8_operands import (
    Split,
    along_features,
    along_rows,
    by_given_scale,
    gradient_format,
    in_groups,
    kernel_along,
)
from jaxtrain.transforms.fp8_scales import E4M3, Quantized, largest_magnitude
from jaxtrain.transforms.kernel_scales import KernelScales
from jaxtrain.transforms.scaled_product import scaled_product

NAME = "fp8_product"

_primitive = Primitive(NAME)


def fp8_product(
    x: jax.Array, kernel: jax.Array, *bias: jax.Array, fp8: Fp8, result: Any, scales: KernelScales | None = None
) -> jax.Array:
    """Multiply rows with a parameter in 8 bits.

    Args:
      x: [..., K], with at least one axis of rows, in the compute dtype.
      kernel: [K, N], in the dtype of the parameter.
      *bias: At most one: [1, …, 1, N] in the compute dtype, added to the float32 sums.
      fp8: The settings.
      result: Dtype of the result: the compute dtype, or float32 for a product that is not rounded.
      scales: With the scaling "delayed", the scales of `x`, `kernel` and the gradient, float32[3].

    Returns:
      [..., N]. The gradients by `x` and by `kernel` are products in 8 bits, rounded to the dtype of `x`; that by `bias`
      is summed in float32; that by the probe of `scales` is the largest magnitudes of `x`, `kernel` and the gradient.

    Example:
      >>> x, kernel = jnp.full((2, 16), 0.3, jnp.bfloat16), jnp.full((16, 16), 2.0)
      >>> fp8_product(x, kernel, fp8=Fp8(), result=jnp.bfloat16)[0, 0].item()
      9.625
    """
    product: jax.Array = _primitive.bind(x, kernel, *bias, *(scales or ()), fp8=fp8, result=np.dtype(result))
    return product


class Residuals(NamedTuple):
    """What the backward pass of a product keeps.

    Attributes:
      x: The rows, quantized along rows.
      kernel: The kernel, quantized along its columns.
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
      operands: Shapes and dtypes of the rows, the kernel, the bias, if there is one, and the two of the scales with the
        scaling "delayed".
      split: Splits rows into groups, by which the gradients of kernel and bias are summed; None for one sum.
    """

    fp8: Fp8
    result: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    split: Split | None = None

    @classmethod
    def of(cls, operands: Any, fp8: Fp8, result: Any, split: Split | None = None) -> "Product":
        """Return the product of such operands."""
        return cls(fp8, result, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands), split)

    def forward(self, x: jax.Array, kernel: jax.Array, *rest: jax.Array) -> tuple[jax.Array, Residuals]:
        """Return the product and what its derivative needs."""
        return self._delayed(x, kernel, *rest) if self.fp8.is_delayed else self._current(x, kernel, *rest)

    def _delayed(self, x: jax.Array, kernel: jax.Array, *rest: jax.Array) -> tuple[jax.Array, Residuals]:
        *bias, scale, _ = rest
        rows, columns = by_given_scale(x, E4M3, scale[0]), by_given_scale(kernel, E4M3, scale[1])
        out = self._by_features(rows, columns, 0, self.result, *bias)
        amax = jnp.stack([_amax(x), _amax(kernel)])
        return out, Residuals(in_groups(rows, self.split), columns, (scale[2], amax))

    def _current(self, x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> tuple[jax.Array, Residuals]:
        rows, columns = along_features(self.fp8, x, E4M3), kernel_along(self.fp8, kernel, 0)
        out = self._by_features(rows, columns, 0, self.result, *bias)
        if self.fp8.scaling == "tensor":  # one scale, whatever the sum is over
            return out, Residuals(in_groups(rows, self.split), columns)
        return out, Residuals(along_rows(self.fp8, x, E4M3, self.split), kernel_along(self.fp8, kernel, 1))

    def backward(self, residuals: Residuals, gradient: jax.Array) -> tuple[jax.Array, ...]:
        """Return the gradients by the operands; those by kernel and bias [groups, …] if rows are split."""
        x, kernel, *rest = self.operands
        gradient = gradient.astype(x.dtype)
        dtype = gradient_format(self.fp8)
        bias, of_scales = rest, []
        if residuals.delayed is None:
            by_features = along_features(self.fp8, gradient, dtype)
        else:
            scale, amax = residuals.delayed
            by_features = by_given_scale(gradient, dtype, scale)
            bias, of_scales = rest[:-2], [jnp.zeros_like(rest[-2]), jnp.append(amax, _amax(gradient))]
        if self.fp8.is_per_tensor:
            by_rows = in_groups(by_features, self.split)
        else:
            by_rows = along_rows(self.fp8, gradient, dtype, self.split)
        of_x = self._by_features(by_features, residuals.kernel, 1, x.dtype)[..., : x.shape[-1]]
        of_kernel = self._by_rows(residuals.x, by_rows).astype(kernel.dtype)
        return of_x, of_kernel, *(self._sum(gradient, b.dtype) for b in bias), *of_scales

    def _by_features(self, rows: Quantized, kernel: Quantized, axis: int, result: Any, *bias: jax.Array) -> jax.Array:
        """Multiply rows with a kernel, of which an axis is summed over."""
        tiled = self.fp8.scaling == "block"
        numbers = (((rows.data.ndim - 1 - tiled,), (axis,)), ((), ()))
        n = self.operands[1].shape[1 - axis]
        kernel = _first(kernel, n, 1 - axis + tiled)
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
        return fp8_product(*operands, fp8=product.fp8, result=product.result)

    multiply.defvjp(lambda *operands: product.forward(*operands), product.backward)
    return multiply


def evaluate(*operands: jax.Array, fp8: Fp8, result: Any) -> jax.Array:
    """Compute the primitive by the operations that it consists of."""
    return Product.of(operands, fp8, result).forward(*operands)[0]


def _jvp(primals: Any, tangents: Any, *, fp8: Fp8, result: Any) -> tuple[jax.Array, jax.Array]:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    out, tangent = jax.jvp(differentiable(Product.of(primals, fp8, result)), tuple(primals), tuple(tangents))
    return out, tangent


def _batch(args: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    return jax.vmap(functools.partial(evaluate, **params), axes)(*args), 0


_primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(_primitive.bind, **params))(*args))
_primitive.def_abstract_eval(
    lambda *args, **params: jax.make_jaxpr(functools.partial(evaluate, **params))(*args).out_avals[0]
)
ad.primitive_jvps[_primitive] = _jvp
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, mlir.lower_fun(evaluate, multiple_results=False))
