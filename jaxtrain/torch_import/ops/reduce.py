"""Reductions and scans."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.losses import subgradients
from jaxtrain.torch_import.ops.table import in_opmath, of_vectors, op, ops

Dims = int | Sequence[int] | None


def axes(dim: Dims) -> int | tuple[int, ...] | None:
    """Return PyTorch's dims as axes: none of them means all."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


ops(
    {
        "any.default any.dim any.dims _is_any_true.default": lambda x, dim=None, keepdim=False: jnp.any(
            x, axes(dim), keepdims=keepdim
        ),
        "all.default all.dim all.dims _is_all_true.default": lambda x, dim=None, keepdim=False: jnp.all(
            x, axes(dim), keepdims=keepdim
        ),
        "amax.default": lambda x, dim=(), keepdim=False: jnp.max(x, axes(dim), keepdims=keepdim),
        "amin.default": lambda x, dim=(), keepdim=False: jnp.min(x, axes(dim), keepdims=keepdim),
        "max.default": jnp.max,
        "min.default": jnp.min,
        "count_nonzero.dim_IntList": lambda x, dim: jnp.count_nonzero(x, axes(dim)),
        "count_nonzero.default": lambda x, dim=None: jnp.count_nonzero(x, axes(dim)),
        "cumprod.default": of_vectors(lambda x, dim, dtype=None: in_opmath(jnp.cumprod)(_as(x, dtype), dim)),
        "logcumsumexp.default": of_vectors(lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim)),
        "diff.default": lambda x, n=1, dim=-1, prepend=None, append=None: jnp.diff(x, n, dim, prepend, append),
    }
)


@op("argmax.default")
def argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """Index of the first maximum along an axis, or of all elements."""
    if x.dtype.itemsize == 8:
        return _first((x == jnp.max(x, dim, keepdims=True)) | jnp.isnan(x), dim, keepdim)
    return jnp.argmax(x, dim, keepdims=keepdim)


@op("argmin.default")
def argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """Index of the first minimum along an axis, or of all elements."""
    if x.dtype.itemsize == 8:
        return _first((x == jnp.min(x, dim, keepdims=True)) | jnp.isnan(x), dim, keepdim)
    return jnp.argmin(x, dim, keepdims=keepdim)


def _first(chosen: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    """Return the index of the first chosen element: JAX lowers an argmax of 64 bits in its 64-bit mode alone."""
    with jax.enable_x64(False):
        return jnp.argmax(chosen, dim, keepdims=keepdim)


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x in a dtype; `dtype=` of `jnp.sum` would add in bfloat16 where PyTorch rounds once."""
    return x if dtype is None else x.astype(dtype)


@op("sum.default", "sum.dim_IntList")
def sum(x: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Sum; of bools and integers as int64."""
    return jnp.sum(_as(x, dtype), axes(dim), keepdims=keepdim)


@op("nansum.default")
def nansum(x: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Sum of what is not NaN."""
    return jnp.sum(_as(jnp.where(jnp.isnan(x), 0, x), dtype), axes(dim), keepdims=keepdim)


@op("mean.default", "mean.dim")
def mean(x: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Mean."""
    return jnp.mean(_as(x, dtype), axes(dim), keepdims=keepdim)


@op("prod.default")
def prod(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Product of all elements."""
    return jnp.prod(_as(x, dtype))


@op("prod.dim_int")
@of_vectors
def prod_dim(x: jax.Array, dim: int, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Product along an axis."""
    return jnp.prod(_as(x, dtype), dim, keepdims=keepdim)


@op("cumsum.default")
@of_vectors
def cumsum(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Cumulative sum."""
    return in_opmath(jnp.cumsum)(_as(x, dtype), dim)


def _moments(x: jax.Array, dim: Dims) -> tuple[tuple[int, ...], int]:
    """Return the axes and the number of elements that a variance is taken over."""
    reduced = axes(dim)
    chosen = tuple(range(x.ndim)) if reduced is None else (reduced,) if isinstance(reduced, int) else reduced
    chosen = tuple(i % x.ndim for i in chosen) if x.ndim else ()
    count = 1
    for i in chosen:
        count *= x.shape[i]
    return chosen, count


@op("var.correction")
@in_opmath
def var(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> jax.Array:
    """Variance, by default the unbiased one."""
    chosen, count = _moments(x, dim)
    centered = x - jnp.mean(x, chosen, keepdims=True)
    return jnp.square(centered).sum(chosen, keepdims=keepdim) / (count - (1 if correction is None else correction))


@op("var.dim")
@in_opmath
def var_dim(x: jax.Array, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> jax.Array:
    """Variance with a flag for the unbiased one."""
    return var(x, dim, correction=int(unbiased), keepdim=keepdim)


@op("std.correction")
@in_opmath
def std(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> jax.Array:
    """Standard deviation, with gradient 0 for a constant."""
    variance = var(x, dim, correction=correction, keepdim=keepdim)
    zero = variance == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, variance)))


@op("var_mean.correction")
@in_opmath
def var_mean(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Variance and mean."""
    return var(x, dim, correction=correction, keepdim=keepdim), jnp.mean(x, axes(dim), keepdims=keepdim)


@op("std_mean.correction")
@in_opmath
def std_mean(x: jax.Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Standard deviation and mean."""
    return std(x, dim, correction=correction, keepdim=keepdim), jnp.mean(x, axes(dim), keepdims=keepdim)


@op("max.dim")
@of_vectors
def max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Maxima along an axis, the first of equal ones, and their indices."""
    return _selected(x, argmax, dim, keepdim)


@op("min.dim")
@of_vectors
def min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Minima along an axis, the first of equal ones, and their indices."""
    return _selected(x, argmin, dim, keepdim)


def _selected(x: jax.Array, best: Any, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    index = best(x, dim, keepdim=True)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@op("logsumexp.default")
@of_vectors
@in_opmath
def logsumexp(x: jax.Array, dim: Dims, keepdim: bool = False) -> jax.Array:
    """Logarithm of a sum of exponentials."""
    return jax.nn.logsumexp(x, axes(dim), keepdims=keepdim)


@op("linalg_vector_norm.default")
def vector_norm(x: jax.Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Vector norm, with gradient 0 for a zero vector."""
    x = _as(x, dtype)
    chosen, _ = _moments(x, dim)
    flat = jnp.moveaxis(x, chosen, range(len(chosen)))
    rest = flat.shape[len(chosen) :]
    norm = _norm_of_columns(flat.reshape(-1, *rest), float(ord))
    return jnp.expand_dims(norm, sorted(chosen)) if keepdim else norm


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _negative_norm(ord: float, x: jax.Array) -> jax.Array:
    return (jnp.abs(x) ** ord).sum(0) ** (1 / ord)


@_negative_norm.defjvp
def _negative_norm_jvp(ord: float, primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    """The gradient of elements that are 0 is 0."""
    (x,), (tangent,) = primals, tangents
    norm = _negative_norm(ord, x)
    slope = jnp.where(x == 0, 0, jnp.sign(x) * jnp.abs(jnp.where(x == 0, 1, x)) ** (ord - 1))
    return norm, (slope * tangent).sum(0) * norm ** (1 - ord)


@in_opmath
def _norm_of_columns(x: jax.Array, ord: float) -> jax.Array:
    if ord == 0:
        return (x != 0).sum(0).astype(x.dtype)
    if ord == -math.inf:
        return jnp.min(subgradients.abs(x), 0)
    if ord < 0:
        return _negative_norm(ord, x)
    return subgradients.norm(x, ord, 0)


@op("norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def norm(x: jax.Array, p: float | None = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Vector norm by PyTorch's older function."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype)


@op("median.default")
def median(x: jax.Array) -> jax.Array:
    """The lower median of all elements."""
    return subgradients.median(x)
