"""Solutions of linear systems, and inverses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg

from jaxtrain.torch_import.ops.matrices.decomposition import singular
from jaxtrain.torch_import.ops.table import op, ops, with_gradient


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _no_errors(x: jax.Array) -> jax.Array:
    """Return the error codes of a batch of solutions, which JAX reports as NaN instead."""
    return jnp.zeros(x.shape[:-2], jnp.int32)


def _inverse(x: jax.Array) -> jax.Array:
    return jnp.linalg.inv(x) if x.size else x


ops(
    {
        "inverse.default linalg_inv.default": _inverse,
        "linalg_inv_ex.default": lambda x, *, check_errors=False: (_inverse(x), _no_errors(x)),
        "cholesky_inverse.default": lambda x, upper=False: _inverse(_of_cholesky(x, upper)),
    }
)


@op("linalg_solve.default")
def solve(a: jax.Array, b: jax.Array, *, left: bool = True) -> jax.Array:
    """The solution x of a x = b, or of x a = b."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if vector:
        return jnp.linalg.solve(a, b[..., None])[..., 0]
    if not left:
        return jnp.swapaxes(solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)), -1, -2)
    return jnp.linalg.solve(*_batched(a, b))


@op("_linalg_solve_ex.default")
def solve_with_factors(a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    """The solution with the decomposition of a and error codes."""
    del check_errors
    factors, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    return solve(a, b, left=left), factors, pivots + 1, _no_errors(a)


def _batched(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, lead + a.shape[-2:]), jnp.broadcast_to(b, lead + b.shape[-2:])


@op("linalg_solve_triangular.default")
def solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    """The solution of a triangular system."""
    if not left:
        transposed = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)
        x = solve_triangular(*transposed, upper=not upper, unitriangular=unitriangular)
        return jnp.swapaxes(x, -1, -2)
    a, b = _batched(a, b)
    return linalg.solve_triangular(a, b, lower=not upper, unit_diagonal=unitriangular)


@op("triangular_solve.default")
def triangular_solve(
    b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The solution of a triangular system by PyTorch's older function, with the broadcast matrix."""
    a, b = _batched(a, b)
    used = _adjoint(a) if transpose else a
    return solve_triangular(used, b, upper=upper != transpose, unitriangular=unitriangular), a


@op("cholesky_solve.default")
def cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    """The solution for a matrix given by its Cholesky factor."""
    return jnp.linalg.solve(*_batched(_of_cholesky(factor, upper), b))


def _of_cholesky(factor: jax.Array, upper: bool) -> jax.Array:
    """Return the matrix of a Cholesky factor. PyTorch's gradient is that of all elements of the factor."""
    triangle = jnp.triu(factor) if upper else jnp.tril(factor)
    whole = with_gradient(triangle, factor)
    return _adjoint(whole) @ whole if upper else whole @ _adjoint(whole)


@op("linalg_lu_solve.default")
def lu_solve(
    factors: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    """The solution for a matrix given by its LU decomposition."""
    if not left:
        return _adjoint(lu_solve(factors, pivots, _adjoint(b), adjoint=not adjoint))
    factors, b = _batched(factors, b)
    swaps = jnp.broadcast_to(pivots.astype(jnp.int32) - 1, factors.shape[:-1])
    permutation = lax.linalg.lu_pivots_to_permutation(swaps, factors.shape[-1])
    if not adjoint:
        permuted = jnp.take_along_axis(b, permutation[..., None], -2)
        half = solve_triangular(factors, permuted, upper=False, unitriangular=True)
        return solve_triangular(factors, half, upper=True)
    half = solve_triangular(_adjoint(factors), b, upper=False)
    permuted = solve_triangular(_adjoint(factors), half, upper=True, unitriangular=True)
    return jnp.take_along_axis(permuted, jnp.argsort(permutation)[..., None], -2)


@op("linalg_pinv.atol_rtol_tensor")
def pinv(
    x: jax.Array, *, atol: jax.Array | None = None, rtol: jax.Array | None = None, hermitian: bool = False
) -> jax.Array:
    """The pseudoinverse; singular values up to max(atol, rtol * the largest) count as 0."""
    if hermitian:
        # Of a Hermitian matrix the lower triangle is read, but all of it has a gradient.
        x = with_gradient(jnp.tril(x) + _adjoint(jnp.tril(x, -1)), x)
    if not x.size:
        return jnp.swapaxes(x, -1, -2)
    least = jnp.zeros(x.shape[:-2], x.real.dtype) if atol is None else atol
    if rtol is None:
        default = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
        rtol = jnp.where(least > 0, 0, default) if atol is not None else jnp.full(least.shape, default)
    return _pinv(x, lax.stop_gradient(least), lax.stop_gradient(rtol))


@op("linalg_pinv.atol_rtol_float")
def pinv_of_numbers(
    x: jax.Array, *, atol: float | None = None, rtol: float | None = None, hermitian: bool = False
) -> jax.Array:
    """The pseudoinverse, with tolerances as numbers."""
    least, relative = (None if value is None else jnp.full(x.shape[:-2], value) for value in (atol, rtol))
    return pinv(x, atol=least, rtol=relative, hermitian=hermitian)


@op("linalg_pinv.default")
def pinv_by_rcond(x: jax.Array, rcond: float, hermitian: bool = False) -> jax.Array:
    """The pseudoinverse, with a relative tolerance."""
    return pinv(x, atol=jnp.zeros(x.shape[:-2]), rtol=jnp.full(x.shape[:-2], rcond), hermitian=hermitian)


@jax.custom_jvp
def _pinv(x: jax.Array, atol: jax.Array, rtol: jax.Array) -> jax.Array:
    u, s, vh = singular(x)
    kept = s > jnp.maximum(atol[..., None], rtol[..., None] * s[..., :1])
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    return (_adjoint(vh) * inverse[..., None, :]) @ _adjoint(u)


@_pinv.defjvp
def _pinv_jvp(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """The derivative of Golub and Pereyra (1973)."""
    x, dx = primals[0], tangents[0]
    p = _pinv(*primals)
    ph, dxh = _adjoint(p), _adjoint(dx)
    left = p @ (ph @ (dxh - (dxh @ x) @ p))
    right = (dxh - (p @ x) @ dxh) @ ph @ p
    return p, left + right - p @ dx @ p
