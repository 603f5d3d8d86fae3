"""Decompositions of matrices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.torch_import.ops.table import op

Arrays = tuple[jax.Array, ...]


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _codes(x: jax.Array) -> jax.Array:
    """Return the error codes of a batch of decompositions, which JAX reports as NaN instead."""
    return jnp.zeros(x.shape[:-2], jnp.int32)


def singular(x: jax.Array, *, full_matrices: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the singular value decomposition; of a matrix that is not finite NaN, as are its gradients."""
    finite, lost = _finite(x)
    u, s, vh = jnp.linalg.svd(finite, full_matrices=full_matrices)
    return u + lost, s + lost[..., 0].real, vh + lost


def _finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return matrices with zeros for those that are not finite, and [..., 1, 1] to add to results: 0, or NaN for these.

    LAPACK decomposes a matrix with an infinity endlessly. PyTorch raises an error.
    """
    if not x.size:
        return x, jnp.zeros((1, 1), x.dtype)
    finite = jnp.isfinite(x).all((-2, -1), keepdims=True)
    return jnp.where(finite, x, 0), jnp.where(finite, 0, jnp.nan).astype(x.dtype) * x[..., :1, :1]


@op("_linalg_svd.default")
def svd(
    x: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Any, jax.Array, Any]:
    """Singular value decomposition. The vectors that `full_matrices` adds have no gradient, as in PyTorch."""
    del driver
    if not compute_uv:
        finite, lost = _finite(x)
        return None, jnp.linalg.svd(finite, compute_uv=False) + lost[..., 0].real, None
    u, s, vh = singular(x)
    if full_matrices and x.shape[-1] != x.shape[-2]:
        all_u, _, all_vh = singular(lax.stop_gradient(x), full_matrices=True)
        count = s.shape[-1]
        u = jnp.concatenate([u, all_u[..., count:]], -1)
        vh = jnp.concatenate([vh, all_vh[..., count:, :]], -2)
    return u, s, vh


@op("_linalg_eigh.default")
def eigh(x: jax.Array, triangle: str = "L", compute_v: bool = True) -> Arrays:
    """Eigenvalues and eigenvectors of a symmetric matrix, of which one triangle is read.

    The gradient is that of the whole matrix: PyTorch spreads it over both triangles.
    """
    del compute_v
    values, vectors = _eigh(x, triangle == "L")
    return values, vectors


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _eigh(x: jax.Array, lower: bool) -> Arrays:
    vectors, values = lax.linalg.eigh(x, lower=lower, symmetrize_input=False)
    return values, vectors


def _eigh_forward(x: jax.Array, lower: bool) -> tuple[Arrays, Arrays]:
    result = _eigh(x, lower)
    return result, result


def _eigh_backward(lower: bool, result: Arrays, grads: Arrays) -> tuple[jax.Array]:
    return (jnp.conj(_eigen_gradient(result, (jnp.conj(grads[0]), jnp.conj(grads[1])), hermitian=True)),)


_eigh.defvjp(_eigh_forward, _eigh_backward)


def _eigen_gradient(result: Arrays, grads: Arrays, *, hermitian: bool) -> jax.Array:
    """Return PyTorch's gradient of an eigendecomposition.

    References:
      `linalg_eig_backward` in PyTorch's `FunctionsManual.cpp`.
    """
    (values, vectors), (grad_values, grad_vectors) = result, grads
    inner = _adjoint(vectors) @ grad_vectors
    if not hermitian:
        diagonal = jnp.diagonal(inner, axis1=-2, axis2=-1)
        inner = inner - _adjoint(vectors) @ vectors * diagonal.real[..., None, :].astype(inner.dtype)
    eye = jnp.eye(values.shape[-1], dtype=bool)
    gaps = jnp.conj(values[..., None, :] - values[..., :, None])
    inner = jnp.where(eye, grad_values[..., None, :].astype(inner.dtype), inner / jnp.where(eye, 1, gaps))
    if hermitian:
        return vectors @ inner @ _adjoint(vectors)
    return jnp.linalg.solve(_adjoint(vectors), inner @ _adjoint(vectors))


@op("linalg_eig.default")
@jax.custom_vjp
def eig(x: jax.Array) -> Arrays:
    """Eigenvalues and eigenvectors of a square matrix."""
    return tuple(jnp.linalg.eig(x))


def _eig_forward(x: jax.Array) -> tuple[Arrays, tuple[Arrays, jax.Array]]:
    result = tuple(jnp.linalg.eig(x))
    return result, (result, jnp.zeros((), x.dtype))


def _eig_backward(saved: tuple[Arrays, jax.Array], grads: Arrays) -> tuple[jax.Array]:
    result, of_input = saved
    grad = jnp.conj(_eigen_gradient(result, (jnp.conj(grads[0]), jnp.conj(grads[1])), hermitian=False))
    return (grad if jnp.iscomplexobj(of_input) else grad.real,)


eig.defvjp(_eig_forward, _eig_backward)


@op("linalg_eigvals.default")
def eigvals(x: jax.Array) -> jax.Array:
    """Eigenvalues of a square matrix."""
    values: jax.Array = eig(x)[0]
    return values


@op("linalg_qr.default")
def qr(x: jax.Array, mode: str = "reduced") -> tuple[Any, jax.Array]:
    """QR decomposition; with the mode "r" of R alone, which then has no gradient in PyTorch."""
    if mode == "r":
        return None, lax.stop_gradient(jnp.linalg.qr(x, mode="r"))
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@op("linalg_lu_factor_ex.default")
def lu_factor(x: jax.Array, *, pivot: bool = True, check_errors: bool = False) -> Arrays:
    """LU decomposition in one matrix, with its row swaps."""
    del check_errors
    _with_pivots(pivot)
    lu, pivots, _ = lax.linalg.lu(x)
    return lu, pivots + 1, _codes(x)


@op("linalg_lu_factor.default")
def lu_factor_of_invertible(x: jax.Array, *, pivot: bool = True) -> Arrays:
    """LU decomposition in one matrix, with its row swaps."""
    return lu_factor(x, pivot=pivot)[:2]


def _with_pivots(pivot: bool) -> None:
    if not pivot:
        raise NotImplementedError("pivot=False")


@op("linalg_lu.default")
def lu(x: jax.Array, *, pivot: bool = True) -> Arrays:
    """LU decomposition with its permutation matrix."""
    _with_pivots(pivot)
    factors, _, permutation = lax.linalg.lu(x)
    return (_permutation_matrix(permutation, x.dtype), *_triangles(factors))


def _triangles(factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return L and U of an LU decomposition in one matrix."""
    rows, columns = factors.shape[-2:]
    count = min(rows, columns)
    lower = jnp.tril(factors[..., :, :count], -1) + jnp.eye(rows, count, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :count, :])


def _permutation_matrix(permutation: jax.Array, dtype: Any) -> jax.Array:
    return jnp.swapaxes(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype), -1, -2)


@op("lu_unpack.default")
def lu_unpack(
    factors: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Any, Any, Any]:
    """The matrices of an LU decomposition."""
    lower, upper = _triangles(factors) if unpack_data else (None, None)
    if not unpack_pivots:
        return None, lower, upper
    permutation = lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, factors.shape[-2])
    return _permutation_matrix(permutation, factors.dtype), lower, upper


@op("linalg_householder_product.default", "orgqr.default")
def householder_product(x: jax.Array, tau: jax.Array) -> jax.Array:
    """The first columns of a product of Householder reflections, given by the columns of x below its diagonal."""
    eye = jnp.broadcast_to(jnp.eye(x.shape[-2], x.shape[-1], dtype=x.dtype), x.shape)
    return _reflected(eye, x, tau, reverse=True)


@op("ormqr.default")
def ormqr(x: jax.Array, tau: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False) -> jax.Array:
    """A matrix times a product of Householder reflections, or times its adjoint."""
    if not left:
        return _adjoint(ormqr(x, tau, _adjoint(other), True, not transpose))
    return _reflected(other, x, jnp.conj(tau) if transpose else tau, reverse=not transpose)


def _reflected(y: jax.Array, x: jax.Array, tau: jax.Array, *, reverse: bool) -> jax.Array:
    """Apply reflections I - tau v vᴴ to y, one after another."""
    if not tau.size:
        return y
    rows = jnp.arange(x.shape[-2])

    def reflect(y: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        column = jnp.take(x, i, -1)
        v = jnp.where(rows == i, 1, jnp.where(rows < i, 0, column))[..., None]
        return y - jnp.take(tau, i, -1)[..., None, None] * v @ (_adjoint(v) @ y), None

    return lax.scan(reflect, y, jnp.arange(tau.shape[-1]), reverse=reverse)[0]
