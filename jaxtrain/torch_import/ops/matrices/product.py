"""Matrix products."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.torch_import.ops.table import in_opmath, op, ops

ops(
    {
        "matmul.default mm.default bmm.default mv.default dot.default vdot.default": jnp.matmul,
        "einsum.default": lambda equation, tensors, path=None: jnp.einsum(equation, *tensors),
        "linalg_vecdot.default": lambda x, y, dim=-1: (x * y).sum(dim),
        "outer.default": in_opmath(jnp.outer),
        "kron.default": in_opmath(jnp.kron),
    }
)


@op("linear.default")
def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x Wᵀ + b, of rows that are one axis, as `jaxtrain.models.layers.linear`."""
    rows = jnp.matmul(x.reshape(-1, x.shape[-1]), weight.T)
    y = rows if bias is None else rows + bias.reshape((1,) * (rows.ndim - bias.ndim) + bias.shape)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


@op("addmm.default", "baddbmm.default", "addmv.default")
def addmm(added: jax.Array, x: jax.Array, y: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """beta * added + alpha * x y."""
    return _weighted_sum(jnp.matmul(x, y), added, alpha, beta)


@in_opmath
def _weighted_sum(product: jax.Array, added: jax.Array, alpha: Any, beta: Any) -> jax.Array:
    product = product if alpha == 1 else alpha * product
    if beta == 0:
        return product
    return product + (added if beta == 1 else beta * added)


@op("bilinear.default")
def bilinear(x: jax.Array, y: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W y + b, a bilinear form for each output."""
    z = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + bias


@op("chain_matmul.default", "linalg_multi_dot.default")
@in_opmath
def multi_dot(tensors: Sequence[jax.Array]) -> jax.Array:
    """The product of several matrices."""
    return jnp.linalg.multi_dot(list(tensors))


@op("_grouped_mm.default")
@op("grouped_mm_fallback.default", library="transformers")
def grouped_mm(x: jax.Array, y: jax.Array, offs: jax.Array | None = None, bias: None = None, dtype: Any = None) -> Any:
    """Products of groups of rows, which end at `offs`, with a matrix for each group."""
    if offs is None or x.ndim != 2 or y.ndim != 3 or bias is not None:
        raise NotImplementedError("groups of something other than rows")
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    z = lax.ragged_dot(x, y, sizes)
    return z if dtype is None else z.astype(dtype)
