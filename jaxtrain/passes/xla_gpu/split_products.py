"""Compute the parts of a split product as products of their own on a GPU.

Attention splits one product into queries, keys and values, which its kernel takes as three arrays: a copy of all of
them. Products of parts of the weight write them where they are used, with the same numbers. The gradient remains one
product of the joined gradients of the parts, summed and rounded once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.passes.xla_gpu.consumed_products import Product, rewrite_products
from jaxtrain.program import equations
from jaxtrain.program import operations as op


def split_products(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Compute each part of a low-precision product that is split along its columns as a product.

    Args:
      fn: A function of arrays.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function on a GPU, whose split products have only a reverse-mode derivative. On any other platform, `fn`.

    Example:
      >>> def halves(x, kernel):
      ...     return jnp.split(x @ kernel, 2, axis=-1)
      >>> x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 6), jnp.bfloat16)
      >>> [str(jax.make_jaxpr(split_products(halves, p))(x, kernel)).count("= dot_general") for p in ("cpu", "gpu")]
      [1, 2]
    """
    return rewrite_products(fn, platform, _splits_columns, _parts)


def _splits_columns(eqn: JaxprEqn) -> bool:
    return op.of(eqn) == op.SPLIT and equations.split_of(eqn).axis == eqn.invars[0].aval.ndim - 1  # type: ignore[attr-defined]


def _parts(eqn: JaxprEqn, args: list[Product]) -> list[jax.Array]:
    (product,), sizes = args, equations.split_of(eqn).sizes

    def multiply(rows: jax.Array, *columns: jax.Array) -> list[jax.Array]:
        computed: list[jax.Array] = []
        for of_part in zip(*(lax.split(x, sizes, axis=1) for x in columns), strict=True):
            # Each waits for the one before it, or XLA would merge them.
            *computed, kernel = lax.optimization_barrier([*computed, of_part[0]])
            computed.append(product.multiply(rows, kernel, *of_part[1:]))
        return computed

    def backward(operands: tuple[jax.Array, ...], gradients: list[jax.Array]) -> tuple[jax.Array, ...]:
        # The barrier keeps reshapes out of the kernel that joins the parts, which then sums the bias's gradient too.
        joined = jnp.concatenate(lax.optimization_barrier(gradients), axis=1)
        of_operands: tuple[jax.Array, ...] = jax.vjp(product.multiply, *operands)[1](joined)
        return of_operands

    parts = jax.custom_vjp(multiply)
    parts.defvjp(lambda *operands: (multiply(*operands), operands), backward)
    shapes = (var.aval.shape for var in eqn.outvars)  # type: ignore[attr-defined]
    return [part.reshape(shape) for part, shape in zip(parts(*product.operands), shapes, strict=True)]
