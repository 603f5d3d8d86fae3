"""A matrix product of low-precision operands with its bias, rounded once, as one primitive.

PyTorch's `addmm` adds the bias to the product's float32 sums and rounds once; on a GPU it is the epilogue of the
product's kernel. XLA:GPU fuses the bias into that epilogue only if the program adds it to a product in low precision,
which elsewhere would round twice. So the primitive has one lowering for GPUs and one for all other platforms. (A
`lax.platform_dependent` would keep the values that the backward pass needs of either branch.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxtrain.program.primitive import primitive

NAME = "biased_product"
KERNEL = "autocast_kernel"
"""Scope of conversions within a PyTorch kernel, between memory and registers."""


def biased_product(x: jax.Array, kernel: jax.Array, bias: jax.Array, dimension_numbers: Any) -> jax.Array:
    """Multiply and add a bias, summed in float32 and rounded once.

    The gradients of `x` and `kernel` are low-precision products; that of the bias is summed in float32 and rounded.

    Args:
      x: bfloat16 or float16.
      kernel: The same dtype.
      bias: The same dtype, [1, …, 1, m] with as many axes as the product.
      dimension_numbers: As for `lax.dot_general`, without batch axes.

    Returns:
      The sum, in the dtype of `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> x, bias = jnp.full((1, 2), 0.5, jnp.bfloat16), jnp.full((1, 2), 256.0, jnp.bfloat16)
      >>> numbers = (((1,), (0,)), ((), ()))
      >>> biased_product(x, jnp.full((2, 2), 1.0 + 2**-7, jnp.bfloat16), bias, numbers).tolist()
      [[258.0, 258.0]]
    """
    return _differentiable(dimension_numbers)(x, kernel, bias)


@functools.cache
def _differentiable(dimension_numbers: Any) -> Callable[..., jax.Array]:
    multiply = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)

    def rounded_once(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        with jax.named_scope(KERNEL):
            product = multiply(x, kernel, preferred_element_type=np.dtype(np.float32))
            return lax.convert_element_type(product + _broadcast(bias, product.shape), x.dtype)

    @jax.custom_jvp
    def layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        reference = jax.make_jaxpr(rounded_once)(x, kernel, bias)
        out: jax.Array = _primitive.bind(x, kernel, bias, jaxpr=reference, dimension_numbers=dimension_numbers)
        return out

    def jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x, kernel, bias), (dx, dkernel, dbias) = primals, tangents
        out = layer(x, kernel, bias)
        products = [multiply(*ab) for ab in ((dx, kernel), (x, dkernel)) if not any(map(_is_zero, ab))]
        with jax.named_scope(KERNEL):
            parts = [lax.convert_element_type(functools.reduce(lax.add, products), np.float32)] if products else []
            if not _is_zero(dbias):
                parts.append(_broadcast(dbias, out.shape))
            return out, lax.convert_element_type(functools.reduce(lax.add, parts), out.dtype)

    layer.defjvp(jvp, symbolic_zeros=True)
    return layer


def _broadcast(bias: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(lax.convert_element_type(bias, np.float32), shape, range(len(shape)))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _evaluate(x: jax.Array, kernel: jax.Array, bias: jax.Array, *, jaxpr: ClosedJaxpr, **_: Any) -> jax.Array:
    (out,) = jaxpr_as_fun(jaxpr)(x, kernel, bias)
    return out


def _in_epilogue(x: jax.Array, kernel: jax.Array, bias: jax.Array, *, dimension_numbers: Any, **_: Any) -> jax.Array:
    product = lax.dot_general(x, kernel, dimension_numbers)
    return product + lax.broadcast_in_dim(bias, product.shape, range(product.ndim))


_primitive = primitive(NAME, _evaluate, on={"cuda": _in_epilogue, "rocm": _in_epilogue})
