"""Decompositions and solutions of linear systems."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import linalg

from jaxtrain.losses import subgradients
from jaxtrain.torch_import.ops.registry import op, ops


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
        "inverse.default linalg_inv.default": jnp.linalg.inv,
        "linalg_inv_ex.default": lambda x, *, check_errors=False: (jnp.linalg.inv(x), _no_errors(x)),
        "linalg_det.default det.default": jnp.linalg.det,
        "linalg_slogdet.default slogdet.default": lambda x: tuple(jnp.linalg.slogdet(x)),
        "logdet.default": lambda x: jnp.where((s := jnp.linalg.slogdet(x)).sign < 0, jnp.nan, s.logabsdet),
        "linalg_matrix_exp.default": linalg.expm,
        "trace.default": jnp.trace,
    }
)


@op("linalg_cross.default")
def cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    """Cross products."""
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


@op("linalg_solve.default")
def solve(a: jax.Array, b: jax.Array, *, left: bool = True) -> jax.Array:
    """The solution x of a x = b, or of x a = b."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if vector:
        return jnp.linalg.solve(a, b[..., None])[..., 0]
    if not left:
        return jnp.swapaxes(solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)), -1, -2)
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.linalg.solve(jnp.broadcast_to(a, lead + a.shape[-2:]), jnp.broadcast_to(b, lead + b.shape[-2:]))


@op("linalg_solve_triangular.default")
def solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    """The solution of a triangular system."""
    if not left:
        transposed = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)
        x = solve_triangular(*transposed, upper=not upper, unitriangular=unitriangular)
        return jnp.swapaxes(x, -1, -2)
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = jnp.broadcast_to(a, lead + a.shape[-2:]), jnp.broadcast_to(b, lead + b.shape[-2:])
    return linalg.solve_triangular(a, b, lower=not upper, unit_diagonal=unitriangular)


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
    if p == 0:
        raise NotImplementedError("p = 0")
    differences = x[..., :, None, :] - y[..., None, :, :]
    return subgradients.norm(jnp.moveaxis(differences, -1, 0), p, 0)
