"""What the kernels of `pallas_gpu` compute of a tile: some queries and some keys of one row and one head."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.models.attention.attention_options import Options
from jaxtrain.models.attention.block_pairs import Sizes
from jaxtrain.models.attention.dropout_mask import kept
from jaxtrain.threefry import threefry2x32


class Problem(NamedTuple):
    """The static part of a kernel.

    Attributes:
      options: What is computed.
      sizes: The blocks.
      rows: Number of rows.
      heads: Number of query heads.
      groups: Number of key heads.
      width: Width H of queries and keys.
      value_width: Width V of values.
      wide: Dtype of sums.
    """

    options: Options
    sizes: Sizes
    rows: int
    heads: int
    groups: int
    width: int
    value_width: int
    wide: Any


class Place(NamedTuple):
    """A tile: its row, its query head, its first query and its first key."""

    row: Any
    head: Any
    q: Any
    k: Any


class Tiles:
    """The arrays of a kernel, of which it reads and writes tiles.

    Args:
      problem: The static part.
      refs: References to the arrays by name: those of `attention`, their gradients, lse and weighted [B, N, T].
      is_transposed: Whether tiles of scores are [K, Q] instead of [Q, K], so that they are a left operand of products
        with q. A GPU would copy a transposed operand that it has computed.
    """

    def __init__(self, problem: Problem, refs: Mapping[str, Any], is_transposed: bool = False) -> None:
        self.problem, self.refs, self.is_transposed = problem, refs, is_transposed
        self.options, self.sizes = problem.options, problem.sizes

    def queries(self, name: str, at: Place) -> jax.Array:
        """Return the tile's part of q or of the cotangent, 0 where there is none."""
        ref, mask = self._queries(name, at, "qk" if name == "q" else "v")
        return triton.load(ref, mask=mask, other=None if mask is None else 0)

    def keys(self, name: str, at: Place) -> jax.Array:
        """Return the tile's part of k or v, 0 where there is none."""
        ref, mask = self._keys(name, at)
        return triton.load(ref, mask=mask, other=None if mask is None else 0)

    def store_queries(self, name: str, at: Place, x: jax.Array) -> None:
        """Write the part of the tile's queries to the output or to the gradient of q."""
        ref, mask = self._queries(name, at, "v" if name == "out" else "qk")
        triton.store(ref, x.astype(ref.dtype), mask=mask)

    def store_keys(self, name: str, at: Place, x: jax.Array) -> None:
        """Write the part of the tile's keys to the gradient of k or v."""
        ref, mask = self._keys(name, at)
        triton.store(ref, x.astype(ref.dtype), mask=mask)

    def column(self, name: str, at: Place, other: float) -> jax.Array:
        """Return the tile's part of lse or weighted, as `_by_query`."""
        ref = self.refs[name].at[at.row, at.head, pl.ds(at.q, self.sizes.q)]
        return self._by_query(self._loaded(ref, self._has_queries(at), other))

    def store_column(self, name: str, at: Place, x: jax.Array) -> None:
        """Write the tile's part [Q] of lse."""
        ref = self.refs[name].at[at.row, at.head, pl.ds(at.q, self.sizes.q)]
        triton.store(ref, x, mask=self._has_queries(at))

    def sink(self, at: Place) -> jax.Array:
        """Return the sink of the head."""
        ref = self.refs["sinks"]
        return ref[self._row(ref, at), at.head]

    def scores(self, at: Place, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the scores of the tile, -inf where masked, and the derivative of their soft cap."""
        scores, slope = self.products(q, k) * self.options.scale, None
        if (cap := self.options.softcap) is not None:
            curve = jnp.tanh(scores / cap)
            scores, slope = cap * curve, 1 - curve * curve
        if "bias" in self.refs:
            scores = scores + self._matrix("bias", at, 0).astype(scores.dtype)
        attended = self._attended(at)
        return scores if attended is None else jnp.where(attended, scores, -jnp.inf), slope

    def dropped(self, at: Place, x: jax.Array) -> jax.Array:
        """Set the dropped elements of a tile to 0 and scale the others."""
        options, sizes = self.options, self.sizes
        if "rng" not in self.refs or options.dropout == 0.0:
            return x
        words = [self.refs["rng"][at.row, i] for i in range(3)]
        queries, keys = self._numbers(at) if options.whole is None else self._positions(at)
        shape = self.problem.heads, *(options.whole or (sizes.t, sizes.s))
        keep = kept(words, options.dropout, shape, at.head, queries, keys, threefry2x32)
        return jnp.where(keep, x / (1.0 - options.dropout), 0)

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the products of all rows of queries `x` with all rows of keys `y`, as a tile of scores."""
        return self.product(y, x, 1) if self.is_transposed else self.product(x, y, 1)

    def product(self, x: jax.Array, y: jax.Array, axis: int = 0) -> jax.Array:
        """Return a product of matrices, contracted over that axis of `y`."""
        numbers = (((1,), (axis,)), ((), ()))
        return lax.dot_general(x, y, numbers, preferred_element_type=self.problem.wide)

    def _attended(self, at: Place) -> jax.Array | None:
        """Return which keys of the tile its queries attend to; None for all."""
        options, sizes, parts = self.options, self.sizes, []
        if sizes.s % sizes.k:
            parts.append(self._numbers(at)[1] < sizes.s)
        if options.causal:
            own, other = self._positions(at)
            parts.append(own >= other)
            parts += [] if options.window is None else [own - other < options.window]
        if "q_segments" in self.refs:
            parts.append(self._of_queries("q_segments", at) == self._of_keys("k_segments", at))
        if "mask" in self.refs:
            parts.append(self._matrix("mask", at, False))
        attended = None
        for part in parts:
            part = jnp.broadcast_to(part, (sizes.k, sizes.q) if self.is_transposed else (sizes.q, sizes.k))
            attended = part if attended is None else attended & part
        return attended

    def _numbers(self, at: Place) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of the queries and of the keys."""
        return self._by_query(at.q + _count(self.sizes.q)), self._by_key(at.k + _count(self.sizes.k))

    def _positions(self, at: Place) -> tuple[jax.Array, jax.Array]:
        queries, keys = self._numbers(at)
        queries = self._of_queries("q_positions", at) if "q_positions" in self.refs else queries
        return queries, self._of_keys("k_positions", at) if "k_positions" in self.refs else keys

    def _of_queries(self, name: str, at: Place) -> jax.Array:
        """Return the tile's part of an array [1 or B, T]."""
        ref = self.refs[name]
        given = ref.at[self._row(ref, at), pl.ds(at.q, self.sizes.q)]
        return self._by_query(self._loaded(given, self._has_queries(at), 0))

    def _of_keys(self, name: str, at: Place) -> jax.Array:
        """Return the tile's part of an array [1 or B, S]."""
        ref = self.refs[name]
        given = ref.at[self._row(ref, at), pl.ds(at.k, self.sizes.k)]
        return self._by_key(self._loaded(given, self._has_keys(at), 0))

    def _matrix(self, name: str, at: Place, other: Any) -> jax.Array:
        """Return the tile's part of the mask or the bias, of size 1 along an axis in which it is the same."""
        ref, sizes = self.refs[name], self.sizes
        _, heads, t, s = ref.shape
        zero = jnp.minimum(at.row, 0)  # interpreted kernels load from indices that are arrays only
        of_head = self._row(ref, at), at.head if heads > 1 else zero
        if t > 1 and s > 1:
            given = ref.at[*of_head, pl.ds(at.q, sizes.q), pl.ds(at.k, sizes.k)]
            given = self._loaded(given, self._has_pairs(at), other)
            return given.T if self.is_transposed else given
        if t > 1:
            given = ref.at[*of_head, pl.ds(at.q, sizes.q), zero]
            return self._by_query(self._loaded(given, self._has_queries(at), other))
        if s > 1:
            given = ref.at[*of_head, zero, pl.ds(at.k, sizes.k)]
            return self._by_key(self._loaded(given, self._has_keys(at), other))
        return ref[*of_head, zero, zero][None, None]

    def store_bias(self, row: Any, head: Any, at: Place, x: jax.Array) -> None:
        """Write the tile's part [Q, K] of the gradient of the bias."""
        ref, sizes = self.refs["dbias"], self.sizes
        given = ref.at[row, head, pl.ds(at.q, sizes.q), pl.ds(at.k, sizes.k)]
        triton.store(given, x.astype(ref.dtype), mask=self._has_pairs(at))

    def _queries(self, name: str, at: Place, of: str) -> tuple[Any, jax.Array | None]:
        """Return the reference to the tile's part of an array [B, T, N, H or V], and which elements there are."""
        ref = self.refs[name]
        ref = ref.at[at.row, pl.ds(at.q, self.sizes.q), at.head, self._whole(ref)]
        return ref, self._inside(self._has_queries(at), ref.shape, of)

    def _keys(self, name: str, at: Place) -> tuple[Any, jax.Array | None]:
        """Return the reference to the tile's part of an array [B, S, K, H or V], and which elements there are."""
        key_head = lax.div(at.head, np.int32(self.problem.heads // self.problem.groups))
        ref = self.refs[name]
        ref = ref.at[at.row, pl.ds(at.k, self.sizes.k), key_head, self._whole(ref)]
        return ref, self._inside(self._has_keys(at), ref.shape, "v" if name.endswith("v") else "qk")

    def _inside(self, rows: jax.Array | None, shape: tuple[int, ...], of: str) -> jax.Array | None:
        width = self.problem.value_width if of == "v" else self.problem.width
        columns = None if shape[1] == width else _count(shape[1])[None] < width
        return _both(None if rows is None else rows[:, None], columns, shape)

    def _has_queries(self, at: Place) -> jax.Array | None:
        sizes = self.sizes
        return at.q + _count(sizes.q) < sizes.t if sizes.t % sizes.q else None

    def _has_keys(self, at: Place) -> jax.Array | None:
        sizes = self.sizes
        return at.k + _count(sizes.k) < sizes.s if sizes.s % sizes.k else None

    def _has_pairs(self, at: Place) -> jax.Array | None:
        queries, keys = self._has_queries(at), self._has_keys(at)
        shape = self.sizes.q, self.sizes.k
        return _both(None if queries is None else queries[:, None], None if keys is None else keys[None], shape)

    def _by_query(self, x: jax.Array) -> jax.Array:
        """Return the numbers [Q] of queries so that they are broadcast to a tile of scores."""
        return x[None] if self.is_transposed else x[:, None]

    def _by_key(self, x: jax.Array) -> jax.Array:
        return x[:, None] if self.is_transposed else x[None]

    @staticmethod
    def _whole(ref: Any) -> Any:
        """Return the slice of the last axis, its start of the dtype of the others."""
        zero: Any = np.int32(0)
        return pl.ds(zero, ref.shape[3])

    @staticmethod
    def _row(ref: Any, at: Place) -> Any:
        return jnp.minimum(at.row, ref.shape[0] - 1)

    @staticmethod
    def _loaded(ref: Any, mask: jax.Array | None, other: Any) -> jax.Array:
        return triton.load(ref, mask=mask, other=None if mask is None else other)


def loop(first: Any, stop: Any, step: Callable[[Any, Any], Any], init: Any) -> Any:
    """Return `lax.fori_loop`, over int32 also where the default is int64."""
    lower, upper = (np.int32(x) if isinstance(x, int) else x.astype(np.int32) for x in (first, stop))
    return lax.fori_loop(lower, upper, step, init)


def _both(x: jax.Array | None, y: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if x is None or y is None:
        given = y if x is None else x
        return None if given is None else jnp.broadcast_to(given, shape)
    return jnp.broadcast_to(x, shape) & jnp.broadcast_to(y, shape)


def _count(n: int) -> jax.Array:
    return lax.iota(np.int32, n)
