"""Let the gradient of logits take the place of the logits on a GPU.

The logits of a vocabulary are the largest array of a step. XLA computes their gradient into a second one, although each
element depends on the same element alone: a result of a library's product is overwritten only by an update of a part of
it. So the product has a few columns of zeros more, and the gradient is such an update. (XLA adds columns by itself if
their number is not a multiple of 8.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.passes.numerics.autocast import LOSS
from jaxtrain.passes.xla_gpu.consumed_products import Product, rewrite_products
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

_MULTIPLE = 8  # of columns, for tensor cores


def overwrite_logits(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Let the gradients of low-precision logits [rows, classes] overwrite them, where a loss takes a product.

    Args:
      fn: A function of arrays.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function on a GPU, whose logits have only a reverse-mode derivative. On any other platform, `fn`.

    Example:
      >>> def loss(x, kernel):
      ...     with jax.named_scope(LOSS):
      ...         return jnp.sin((x @ kernel).astype(jnp.float32)).sum()
      >>> x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 6), jnp.bfloat16)
      >>> [str(jax.make_jaxpr(overwrite_logits(loss, p))(x, kernel)).count("bf16[2,8] = dot") for p in ("cpu", "gpu")]
      [0, 1]
    """
    return rewrite_products(fn, platform, _widens_for_a_loss, _widened)


def _widens_for_a_loss(eqn: JaxprEqn) -> bool:
    return (
        op.of(eqn) == op.CONVERT_ELEMENT_TYPE
        and equations.dtype(eqn) == np.float32
        and eqn.invars[0].aval.ndim == 2  # type: ignore[attr-defined]  # XLA would copy logits of more axes first
        and equations.in_scope(eqn, LOSS)
    )


def _widened(eqn: JaxprEqn, args: list[Product]) -> list[jax.Array]:
    (product,) = args
    columns = product.operands[1].shape[1]
    more = _MULTIPLE - columns % _MULTIPLE

    def multiply(rows: jax.Array, *of_columns: jax.Array) -> jax.Array:
        return product.multiply(rows, *(jnp.pad(x, ((0, 0), (0, more))) for x in of_columns))

    @jax.custom_vjp
    def logits(*operands: jax.Array) -> jax.Array:
        return multiply(*operands)[:, :columns]

    def forward(*operands: jax.Array) -> tuple[jax.Array, Any]:
        padded = multiply(*operands)
        return padded[:, :columns], (operands, padded)

    def backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, ...]:
        operands, padded = saved
        # The columns of zeros have no gradient: they are the gradient.
        of_padded = lax.dynamic_update_slice(padded, gradient, (0, 0))
        of_operands: tuple[jax.Array, ...] = jax.vjp(multiply, *operands)[1](of_padded)
        return of_operands

    logits.defvjp(forward, backward)
    return rewrite.bind(eqn, [logits(*product.operands)])
