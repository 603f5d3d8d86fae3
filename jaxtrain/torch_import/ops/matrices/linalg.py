"""Functions of matrices: Cholesky factors, determinants, sums of products, distances."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import linalg

from jaxtrain.losses import subgradients
from jaxtrain.torch_import.ops.reduce import vector_norm
from jaxtrain.torch_import.ops.table import op, ops


def _no_errors(x: jax.Array) -> jax.Array:
    """Return the error codes of a batch of decompositions, which JAX reports as NaN instead."""
    return jnp.zeros(x.shape[:-2], jnp.int32)


ops(
    {
        "cholesky.default linalg_cholesky.default": lambda x, upper=False: jnp.linalg.cholesky(x, upper=upper),
        "linalg_cholesky_ex.default": lambda x, *, upper=False, check_errors=False: (
            jnp.linalg.cholesky(x, upper=upper),
            _no_errors(x),
        ),
        "linalg_det.default det.default": lambda x: (
            jnp.linalg.det(x) if x.shape[-1] else jnp.ones(x.shape[:-2], x.dtype)
        ),
        "linalg_slogdet.default slogdet.default": lambda x: tuple(jnp.linalg.slogdet(x)),
        "logdet.default": lambda x: jnp.where((s := jnp.linalg.slogdet(x)).sign < 0, jnp.nan, s.logabsdet),
        "linalg_matrix_exp.default": linalg.expm,
        "trace.default": jnp.trace,
        "linalg_tensorinv.default": lambda x, ind=2: jnp.linalg.tensorinv(x, ind),
    }
)


@op("linalg_cross.default")
def cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    """Cross products."""
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


@op("addbmm.default")
def addbmm(added: jax.Array, x: jax.Array, y: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """beta * added + alpha * the sum of a batch of products."""
    total = alpha * jnp.matmul(x, y).sum(0)
    return total if beta == 0 else beta * added + total


@op("addr.default")
def addr(added: jax.Array, x: jax.Array, y: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """beta * added + alpha * the outer product of two vectors."""
    outer = alpha * x[:, None] * y
    return outer if beta == 0 else beta * added + outer


@op("_cdist_forward.default")
def cdist(x: jax.Array, y: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    """Distances between all pairs of rows, with gradient 0 where two rows are equal."""
    del compute_mode
    return _length(x[..., :, None, :] - y[..., None, :, :], p)


@op("_pdist_forward.default")
def pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    """Distances between all pairs of different rows."""
    first, second = np.triu_indices(x.shape[0], 1)
    return _length(x[first] - x[second], p)


@op("dist.default")
def dist(x: jax.Array, y: jax.Array, p: float = 2) -> jax.Array:
    """The distance between two arrays."""
    return vector_norm(x - y, p)


def _length(x: jax.Array, p: float) -> jax.Array:
    """Return norms over the last axis; of order 0 the number of elements that are not 0, without gradient."""
    if p == 0:
        return (x != 0).sum(-1).astype(x.dtype)
    return subgradients.norm(jnp.moveaxis(x, -1, 0), p, 0)
