"""The arrays of attention in blocks, and the scores and the masks of a pair of blocks."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.block_pairs import Pairs, Sizes
from jaxtrain.models.attention.dropout_mask import kept


class At(NamedTuple):
    """What a step computes: a row, its first query head, the numbers of the blocks in the row, and among all blocks."""

    row: jax.Array
    head: Any
    q_number: jax.Array
    k_number: jax.Array
    q: jax.Array
    k: jax.Array
    used: jax.Array | None


class Scores(NamedTuple):
    """Scores of a pair of blocks, -inf where masked, and the derivative of their soft cap."""

    masked: jax.Array
    slope: jax.Array | None


class BlockArrays:
    """The blocks of arrays, each computed with by one step of a loop.

    Blocks of queries are [B · parts · blocks, k, N / K · Q, H], those of keys [B · parts · blocks, k, S, H]. The K key
    heads are divided into `parts` of `k` heads each, and one step computes a pair of blocks of one part.

    Attributes:
      steps: Number of steps, int or int32 [].
      most_steps: The largest number of steps.
    """

    def __init__(
        self,
        options: Options,
        sizes: Sizes,
        pairs: Pairs,
        count: Any,
        operands: Operands,
        q: jax.Array,
        k: jax.Array,
        parts: int,
    ) -> None:
        self.options, self.sizes, self.pairs, self.parts = options, sizes, pairs, parts
        self.index = jnp.asarray(pairs.index)
        self.is_partly_used = count is not pairs.count
        self.steps, self.most_steps = count * parts, self.index.shape[0] * parts
        self.rows, _, self.all_heads, _ = q.shape
        self.heads, self.groups = self.all_heads // parts, k.shape[2] // parts
        q_extra, k_extra = sizes.q_blocks * sizes.q - sizes.t, sizes.k_blocks * sizes.k - sizes.s

        def padded(x: jax.Array | None, *extra: int) -> jax.Array | None:
            if x is None or not any(extra):
                return x
            axes = range(x.ndim - len(extra), x.ndim)
            # Of a mask or a bias an axis of size 1 is for all tokens, of segments and positions it is for one token.
            padded_axes = [axis for axis in axes if x.ndim == 2 or x.shape[axis] > 1]
            widths = [(0, n if axis in padded_axes else 0) for axis, n in zip(axes, extra, strict=True)]
            return jnp.pad(x, [(0, 0)] * (x.ndim - len(extra)) + widths)

        both = q_extra, k_extra
        self.operands = operands._replace(
            mask=padded(operands.mask, *both),
            bias=padded(operands.bias, *both),
            q_segments=padded(operands.q_segments, q_extra),
            k_segments=padded(operands.k_segments, k_extra),
            q_positions=padded(operands.q_positions, q_extra),
            k_positions=padded(operands.k_positions, k_extra),
        )

    def at(self, i: Any) -> At:
        """Return what step i computes."""
        i = i.astype(np.int32)  # with x64 that of a loop is int64
        pair, part = (i, np.int32(0)) if self.parts == 1 else (i // self.parts, i % self.parts)
        row, q, k = lax.dynamic_index_in_dim(self.index, pair, keepdims=False)
        used = pair < self.pairs.count if self.is_partly_used else None
        first = row * self.parts + part
        head = jnp.asarray(part * self.heads, np.int32)
        return At(row, head, q, k, first * self.sizes.q_blocks + q, first * self.sizes.k_blocks + k, used)

    def split_queries(self, x: jax.Array, padding: float = 0.0) -> jax.Array:
        """Return [B, T, N, H] as [B · parts · blocks, k, N / K · Q, H]."""
        size, count = self.sizes.q, self.sizes.q_blocks
        x = jnp.pad(x, ((0, 0), (0, size * count - x.shape[1]), (0, 0), (0, 0)), constant_values=padding)
        x = x.reshape(self.rows, count, size, self.parts, self.groups, -1, x.shape[-1]).transpose(0, 3, 1, 4, 5, 2, 6)
        return x.reshape(self.rows * self.parts * count, self.groups, -1, x.shape[-1])

    def joined_queries(self, x: jax.Array) -> jax.Array:
        """Undo `split_queries`."""
        size, count = self.sizes.q, self.sizes.q_blocks
        x = x.reshape(self.rows, self.parts, count, self.groups, -1, size, x.shape[-1]).transpose(0, 2, 5, 1, 3, 4, 6)
        return x.reshape(self.rows, count * size, -1, x.shape[-1])[:, : self.sizes.t]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """Return [B, S, K, H] as [B · parts · blocks, k, size, H]."""
        size, count = self.sizes.k, self.sizes.k_blocks
        x = jnp.pad(x, ((0, 0), (0, size * count - x.shape[1]), (0, 0), (0, 0)))
        x = x.reshape(self.rows, count, size, self.parts, self.groups, x.shape[-1]).transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(self.rows * self.parts * count, self.groups, size, x.shape[-1])

    def joined_keys(self, x: jax.Array) -> jax.Array:
        """Undo `split_keys`."""
        size, count = self.sizes.k, self.sizes.k_blocks
        x = x.reshape(self.rows, self.parts, count, self.groups, size, x.shape[-1]).transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(self.rows, count * size, -1, x.shape[-1])[:, : self.sizes.s]

    def scores(self, at: At, queries: jax.Array, keys: jax.Array) -> Scores:
        """Compute the scores [k, N / K · Q, S] of a pair of blocks."""
        scores = product(block_of(queries, at.q), block_of(keys, at.k), 2) * self.options.scale
        slope = None
        if (cap := self.options.softcap) is not None:
            curve = jnp.tanh(scores / cap)
            scores, slope = cap * curve, 1 - curve * curve
        if (bias := self.operands.bias) is not None:
            scores = scores + self._by_head(self._cut(bias, at)).astype(scores.dtype)
        if (attended := self._attended(at)) is not None:
            scores = jnp.where(attended, scores, -jnp.inf)
        return Scores(scores, slope)

    def _attended(self, at: At) -> jax.Array | None:
        """Return which keys the queries attend to, broadcastable to [k, N / K · Q, S]; None for all."""
        sizes, given, parts = self.sizes, self.operands, []
        if sizes.s % sizes.k:
            parts.append((self._numbers(at.k_number, sizes.k) < sizes.s)[None])
        if self.options.causal:
            own, other = (
                self._numbers(number, size)
                if positions is None
                else self._cut_tokens(positions, at.row, number, size).astype(np.int32)
                for positions, number, size in (
                    (given.q_positions, at.q_number, sizes.q),
                    (given.k_positions, at.k_number, sizes.k),
                )
            )
            distance = own[:, None] - other[None]
            parts.append(distance >= 0)
            parts += [] if self.options.window is None else [distance < self.options.window]
        if given.q_segments is not None and given.k_segments is not None:
            own = self._cut_tokens(given.q_segments, at.row, at.q_number, sizes.q)
            other = self._cut_tokens(given.k_segments, at.row, at.k_number, sizes.k)
            parts.append(own[:, None] == other[None])
        parts += [] if at.used is None else [at.used[None, None]]
        parts = [part[None] for part in parts]
        parts += [] if given.mask is None else [self._cut(given.mask, at)]
        return self._by_head(functools.reduce(operator.and_, parts)) if parts else None

    def dropped(self, at: At, x: jax.Array) -> jax.Array:
        """Set the dropped elements of [k, N / K · Q, S] to 0 and scale the others."""
        rng, rate, sizes = self.operands.rng, self.options.dropout, self.sizes
        if rng is None or rate == 0.0:
            return x
        heads = (at.head + np.arange(self.heads, dtype=np.int32))[:, None, None]
        queries, keys = self._numbers(at.q_number, sizes.q), self._numbers(at.k_number, sizes.k)
        q_positions, k_positions = self.operands.q_positions, self.operands.k_positions
        if self.options.whole is not None and q_positions is not None and k_positions is not None:
            queries = self._cut_tokens(q_positions, at.row, at.q_number, sizes.q)
            keys = self._cut_tokens(k_positions, at.row, at.k_number, sizes.k)
        own, whole = lax.dynamic_index_in_dim(rng, at.row, keepdims=False), self.options.whole or (sizes.t, sizes.s)
        keep = kept(own, rate, (self.all_heads, *whole), heads, queries[None, :, None], keys[None, None])
        return jnp.where(keep.reshape(x.shape), x / (1.0 - rate), 0)

    def bias_with(self, at: At, gradient: jax.Array, of_scores: jax.Array) -> jax.Array:
        """Add the gradient of a pair of blocks to that of the bias."""
        start, shape = self._place(gradient, at)
        added = of_scores.reshape(1, self.heads, self.sizes.q, self.sizes.k)
        axes = tuple(i for i in range(1, 4) if shape[i] == 1)
        added = added.sum(axes, keepdims=True) if axes else added
        old = lax.dynamic_slice(gradient, start, shape)
        return lax.dynamic_update_slice(gradient, old + added, start)

    def _cut(self, x: jax.Array, at: At) -> jax.Array:
        """Return the part of [1 or B, 1 or N, 1 or T, 1 or S] for a pair of blocks, without the first axis."""
        return lax.dynamic_slice(x, *self._place(x, at))[0]

    def _place(self, x: jax.Array, at: At) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        zero = np.int32(0)
        rows, heads, t, s = x.shape
        starts = (
            at.row if rows > 1 else zero,
            at.head if heads > 1 else zero,
            at.q_number * self.sizes.q if t > 1 else zero,
            at.k_number * self.sizes.k if s > 1 else zero,
        )
        return starts, (1, min(heads, self.heads), self.sizes.q if t > 1 else 1, self.sizes.k if s > 1 else 1)

    def _cut_tokens(self, x: jax.Array, row: jax.Array, number: jax.Array, size: int) -> jax.Array:
        start = row if len(x) > 1 else np.int32(0), number * size
        return lax.dynamic_slice(x, start, (1, size))[0]

    def _by_head(self, x: jax.Array) -> jax.Array:
        """Return [1 or heads, 1 or Q, 1 or S] broadcastable to [k, N / K · Q, S]."""
        heads, q, s = x.shape
        if self.heads == self.groups or heads == q == 1:
            return x
        x = jnp.broadcast_to(x, (self.heads, self.sizes.q, s))
        return x.reshape(self.groups, -1, s)

    @staticmethod
    def _numbers(number: jax.Array, size: int) -> jax.Array:
        return number * size + np.arange(size, dtype=np.int32)


def wide(x: jax.Array) -> Any:
    """Return the dtype of sums of products of `x`: float32 at least."""
    return np.promote_types(x.dtype, np.float32)


def block_of(x: jax.Array, number: jax.Array) -> jax.Array:
    """Return one block of [blocks, ...]."""
    return lax.dynamic_index_in_dim(x, number, keepdims=False)


def product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Return the product of [k, m, n] with [k, ...], contracted over that axis of `y`."""
    return lax.dot_general(x, y, (((2,), (axis,)), ((0,), (0,))), preferred_element_type=wide(x))
