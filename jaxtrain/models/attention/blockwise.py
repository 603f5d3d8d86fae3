"""Attention block by block, in memory linear in the length (Rabe and Staats 2021, Dao et al. 2022).

The forward pass keeps the largest score and the sum of the weights of every query (the online softmax of Milakov and
Gimelshein 2018) and returns the logarithm of the sum of exponentials. With it the backward pass computes the weights of
a block again. One loop runs over the pairs of blocks that have anything to compute (`blocks`), whose number may be
known only at run time.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.attention.blocks import Pairs, Sizes, visible_pairs, visible_pairs_by_row
from jaxtrain.models.attention.dropout_mask import kept
from jaxtrain.models.attention.options import Operands, Options

Q_BLOCK, K_BLOCK = 256, 256


class Gradients(NamedTuple):
    """Gradients of q, k and v, and of the bias and the sinks; None for those that are not given."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None


def forward(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
    *,
    blocks: tuple[int, int] = (Q_BLOCK, K_BLOCK),
    by_row: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention and the logarithm of the sum of the exponentials of every query's scores.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H], where K divides N.
      v: Values [B, S, K, V].
      operands: The other arrays.
      blocks: Numbers of queries and of keys of a block, approximately.
      by_row: Whether each step of the loop computes one pair of blocks of every row, so that the rows can be divided
        over devices, instead of one pair of one row.

    Returns:
      The output [B, T, N, V] and the logarithms [B, N, T], in float32 at least. For a query that attends to no key they
      are 0 and -inf. Outputs over disjoint keys are combined in proportion to the exponentials of the logarithms.
    """
    sizes = Sizes.divided(q.shape[1], k.shape[1], *blocks)
    compute = _over_rows(_forward_rows, options, sizes, operands, by_row, len(q))
    out, lse = compute(operands._replace(sinks=None), q, k, v)
    if operands.sinks is None:
        return out, lse
    total = jnp.logaddexp(lse, operands.sinks.astype(lse.dtype)[:, :, None])
    return out * jnp.exp(lse - total).swapaxes(1, 2)[..., None], total


def backward(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    *,
    blocks: tuple[int, int] = (Q_BLOCK, K_BLOCK),
    by_row: bool = False,
) -> Gradients:
    """Compute the gradients of attention.

    The keys may be a part of those that `out` and `lse` were computed from; the gradients are then those of this part,
    and those of the queries are to be summed over the parts.

    Args:
      options: As for `forward`.
      q: As for `forward`.
      k: As for `forward`.
      v: As for `forward`.
      operands: As for `forward`.
      out: Output [B, T, N, V].
      lse: Logarithms [B, N, T].
      cotangent: Gradient of the output [B, T, N, V].
      blocks: As for `forward`.
      by_row: As for `forward`.

    Returns:
      The gradients, in float32 at least.
    """
    sizes = Sizes.divided(q.shape[1], k.shape[1], *blocks)
    lse = lse.astype(_wide(q))
    weighted = jnp.einsum("btnh,btnh->bnt", cotangent.astype(lse.dtype), out.astype(lse.dtype))
    compute = _over_rows(_backward_rows, options, sizes, operands, by_row, len(q))
    dq, dk, dv, bias = compute(operands._replace(sinks=None), q, k, v, cotangent, lse, weighted)
    sinks = operands.sinks
    if sinks is not None:
        shared = jnp.exp(sinks.astype(lse.dtype)[:, :, None] - lse) * weighted
        sinks = _sum_rows(-shared.sum(-1), len(sinks))
    if operands.bias is not None:
        bias = _sum_rows(bias, len(operands.bias))
    return Gradients(dq, dk, dv, bias, sinks)


def _sum_rows(x: jax.Array, rows: int) -> jax.Array:
    return x if len(x) == rows else x.sum(0, keepdims=True)


def _over_rows(
    fn: Callable[..., Any], options: Options, sizes: Sizes, operands: Operands, by_row: bool, rows: int
) -> Callable[..., Any]:
    """Return `fn` of all rows: in one loop, or as one row's loop under vmap."""
    if not by_row:
        pairs = visible_pairs(options, sizes, rows, operands)
        return lambda operands, *arrays: fn(options, sizes, pairs, pairs.count, operands, *arrays)
    pairs = visible_pairs_by_row(options, sizes, rows, operands)
    # The loop runs for the row with the most pairs: a batched trip count would copy what the loop carries.
    count = pairs.count.max()
    count = int(count) if isinstance(count, np.integer) else count

    def one(pairs: Pairs, operands: Operands, *arrays: jax.Array) -> Any:
        outs = fn(options, sizes, pairs, count, operands, *(x[None] for x in arrays))
        return jax.tree.map(lambda x: x[0], outs)

    def compute(operands: Operands, *arrays: jax.Array) -> Any:
        # A shared operand of one row stays as it is; the own row of any other has an axis of size 1.
        own = [None if x is None or len(x) == 1 < rows else 0 for x in operands]
        axes: Any = Operands._make(own)
        given = Operands(
            *(x if x is None or axis is None else x[:, None] for x, axis in zip(operands, own, strict=True))
        )
        return jax.vmap(one, in_axes=(0, axes, *[0] * len(arrays)))(pairs, given, *arrays)

    return compute


def _forward_rows(
    options: Options, sizes: Sizes, pairs: Pairs, count: Any, operands: Operands, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q, k, v = arrays
    block = _Blocks(options, sizes, pairs, count, operands, q, k)
    queries, keys, values = block.split_queries(q), block.split_keys(k), block.split_keys(v)
    wide, lead = _wide(q), queries.shape[:-1]
    lowest = jnp.finfo(wide).min
    init = (
        jnp.full((*lead, 1), lowest, wide),
        jnp.zeros((*lead, 1), wide),
        jnp.zeros((*lead, v.shape[-1]), wide),
    )

    def step(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = block.at(i)
        scores = block.scores(at, queries, keys).masked
        largest, total, summed = (_block(x, at.q) for x in carry)
        new = jnp.maximum(largest, scores.max(-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(largest - new)
        total = total * old + weights.sum(-1, keepdims=True)
        dropped = block.dropped(at, weights).astype(v.dtype)
        summed = summed * old + _product(dropped, _block(values, at.k), 1)
        return tuple(_updated(x, y, at.q) for x, y in zip(carry, (new, total, summed), strict=True))

    largest, total, summed = lax.fori_loop(0, count, step, init)
    lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))
    out = summed / jnp.where(total == 0, 1, total)
    return block.joined_queries(out), block.joined_queries(lse)[..., 0].swapaxes(1, 2)


def _backward_rows(
    options: Options, sizes: Sizes, pairs: Pairs, count: Any, operands: Operands, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    q, k, v, cotangent, lse, weighted = arrays
    block = _Blocks(options, sizes, pairs, count, operands, q, k)
    queries, keys, values, given = (
        *(block.split_queries(q), block.split_keys(k), block.split_keys(v)),
        block.split_queries(cotangent.astype(v.dtype)),
    )
    # The weights of a query without keys, and of one that pads a block, are 0.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse).swapaxes(1, 2)[..., None]
    lse = block.split_queries(lse, padding=jnp.inf)
    weighted = block.split_queries(weighted.swapaxes(1, 2)[..., None])
    wide = _wide(q)
    init = [jnp.zeros(x.shape, wide) for x in (queries, keys, values)]
    bias = block.operands.bias
    init += [] if bias is None else [jnp.zeros(bias.shape, wide)]

    def step(i: Any, carry: list[jax.Array]) -> list[jax.Array]:
        at = block.at(i)
        scores = block.scores(at, queries, keys)
        weights = jnp.exp(scores.masked - _block(lse, at.q))
        of_out = _block(given, at.q)
        dv = _product(block.dropped(at, weights).astype(v.dtype), of_out, 1, transposed=True)
        of_weights = block.dropped(at, _product(of_out, _block(values, at.k), 2))
        of_scores = weights * (of_weights - _block(weighted, at.q))
        added = [] if bias is None else [block.bias_with(at, carry[3], of_scores)]
        of_scores = of_scores * options.scale if scores.slope is None else of_scores * (scores.slope * options.scale)
        of_scores = of_scores.astype(q.dtype)
        dq, dk = _product(of_scores, _block(keys, at.k), 1), _product(of_scores, _block(queries, at.q), 1, True)
        return [_added(carry[0], dq, at.q), _added(carry[1], dk, at.k), _added(carry[2], dv, at.k), *added]

    dq, dk, dv, *dbias = lax.fori_loop(0, count, step, init)
    joined = block.joined_queries(dq), block.joined_keys(dk), block.joined_keys(dv)
    if operands.bias is None:
        return *joined, None
    t, s = operands.bias.shape[2:]
    return *joined, dbias[0][..., :t, :s]


class _At(NamedTuple):
    """A pair of blocks: its row, its numbers in the row, and those among the blocks of all rows."""

    row: jax.Array
    q_number: jax.Array
    k_number: jax.Array
    q: jax.Array
    k: jax.Array
    used: jax.Array | None


class _Scores(NamedTuple):
    """Scores of a pair of blocks, -inf where masked, and the derivative of their soft cap."""

    masked: jax.Array
    slope: jax.Array | None


class _Blocks:
    """The arrays of attention in blocks: queries [B · blocks, K, N / K · Q, H], keys [B · blocks, K, S, H]."""

    def __init__(
        self, options: Options, sizes: Sizes, pairs: Pairs, count: Any, operands: Operands, q: jax.Array, k: jax.Array
    ) -> None:
        self.options, self.sizes, self.pairs = options, sizes, pairs
        self.index = jnp.asarray(pairs.index)
        self.is_partly_used = count is not pairs.count
        self.rows, _, self.heads, _ = q.shape
        self.groups = k.shape[2]
        q_extra, k_extra = sizes.q_blocks * sizes.q - sizes.t, sizes.k_blocks * sizes.k - sizes.s

        def padded(x: jax.Array | None, *extra: int) -> jax.Array | None:
            if x is None or not any(extra):
                return x
            axes = range(x.ndim - len(extra), x.ndim)
            widths = [(0, n if x.shape[axis] > 1 else 0) for axis, n in zip(axes, extra, strict=True)]
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

    def at(self, i: Any) -> _At:
        """Return the pair number i."""
        row, q, k = lax.dynamic_index_in_dim(self.index, i, keepdims=False)
        used = i < self.pairs.count if self.is_partly_used else None
        return _At(row, q, k, row * self.sizes.q_blocks + q, row * self.sizes.k_blocks + k, used)

    def split_queries(self, x: jax.Array, padding: float = 0.0) -> jax.Array:
        """Return [B, T, N, H] as [B · blocks, K, N / K · Q, H]."""
        size, count = self.sizes.q, self.sizes.q_blocks
        x = jnp.pad(x, ((0, 0), (0, size * count - x.shape[1]), (0, 0), (0, 0)), constant_values=padding)
        x = x.reshape(self.rows, count, size, self.groups, -1, x.shape[-1])
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(self.rows * count, self.groups, -1, x.shape[-1])

    def joined_queries(self, x: jax.Array) -> jax.Array:
        """Undo `split_queries`."""
        size, count = self.sizes.q, self.sizes.q_blocks
        x = x.reshape(self.rows, count, self.groups, -1, size, x.shape[-1])
        return x.transpose(0, 1, 4, 2, 3, 5).reshape(self.rows, count * size, -1, x.shape[-1])[:, : self.sizes.t]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """Return [B, S, K, H] as [B · blocks, K, size, H]."""
        size, count = self.sizes.k, self.sizes.k_blocks
        x = jnp.pad(x, ((0, 0), (0, size * count - x.shape[1]), (0, 0), (0, 0)))
        x = x.reshape(self.rows, count, size, self.groups, x.shape[-1])
        return x.swapaxes(2, 3).reshape(self.rows * count, self.groups, size, x.shape[-1])

    def joined_keys(self, x: jax.Array) -> jax.Array:
        """Undo `split_keys`."""
        size, count = self.sizes.k, self.sizes.k_blocks
        x = x.reshape(self.rows, count, self.groups, size, x.shape[-1]).swapaxes(2, 3)
        return x.reshape(self.rows, count * size, self.groups, x.shape[-1])[:, : self.sizes.s]

    def scores(self, at: _At, queries: jax.Array, keys: jax.Array) -> _Scores:
        """Compute the scores [K, N / K · Q, S] of a pair of blocks."""
        scores = _product(_block(queries, at.q), _block(keys, at.k), 2) * self.options.scale
        slope = None
        if (cap := self.options.softcap) is not None:
            curve = jnp.tanh(scores / cap)
            scores, slope = cap * curve, 1 - curve * curve
        if (bias := self.operands.bias) is not None:
            scores = scores + self._by_head(self._cut(bias, at)).astype(scores.dtype)
        if (attended := self._attended(at)) is not None:
            scores = jnp.where(attended, scores, -jnp.inf)
        return _Scores(scores, slope)

    def _attended(self, at: _At) -> jax.Array | None:
        """Return which keys the queries attend to, broadcastable to [K, N / K · Q, S]; None for all."""
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

    def dropped(self, at: _At, x: jax.Array) -> jax.Array:
        """Set the dropped elements of [K, N / K · Q, S] to 0 and scale the others."""
        rng, rate, sizes = self.operands.rng, self.options.dropout, self.sizes
        if rng is None or rate == 0.0:
            return x
        heads = np.arange(self.heads, dtype=np.uint32)[:, None, None]
        queries, keys = self._numbers(at.q_number, sizes.q), self._numbers(at.k_number, sizes.k)
        q_positions, k_positions = self.operands.q_positions, self.operands.k_positions
        if self.options.whole is not None and q_positions is not None and k_positions is not None:
            queries = self._cut_tokens(q_positions, at.row, at.q_number, sizes.q)
            keys = self._cut_tokens(k_positions, at.row, at.k_number, sizes.k)
        own, whole = lax.dynamic_index_in_dim(rng, at.row, keepdims=False), self.options.whole or (sizes.t, sizes.s)
        keep = kept(own, rate, (self.heads, *whole), heads, queries[None, :, None], keys[None, None])
        return jnp.where(keep.reshape(x.shape), x / (1.0 - rate), 0)

    def bias_with(self, at: _At, gradient: jax.Array, of_scores: jax.Array) -> jax.Array:
        """Add the gradient of a pair of blocks to that of the bias."""
        start, shape = self._place(gradient, at)
        added = of_scores.reshape(1, self.heads, self.sizes.q, self.sizes.k)
        axes = tuple(i for i in range(1, 4) if shape[i] == 1)
        added = added.sum(axes, keepdims=True) if axes else added
        old = lax.dynamic_slice(gradient, start, shape)
        return lax.dynamic_update_slice(gradient, old + added, start)

    def _cut(self, x: jax.Array, at: _At) -> jax.Array:
        """Return the part of [1 or B, 1 or N, 1 or T, 1 or S] for a pair of blocks, without the first axis."""
        return lax.dynamic_slice(x, *self._place(x, at))[0]

    def _place(self, x: jax.Array, at: _At) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        zero = np.int32(0)
        rows, heads, t, s = x.shape
        starts = (
            at.row if rows > 1 else zero,
            zero,
            at.q_number * self.sizes.q if t > 1 else zero,
            at.k_number * self.sizes.k if s > 1 else zero,
        )
        return starts, (1, heads, self.sizes.q if t > 1 else 1, self.sizes.k if s > 1 else 1)

    def _cut_tokens(self, x: jax.Array, row: jax.Array, number: jax.Array, size: int) -> jax.Array:
        start = row if len(x) > 1 else np.int32(0), number * size
        return lax.dynamic_slice(x, start, (1, size))[0]

    def _by_head(self, x: jax.Array) -> jax.Array:
        """Return [1 or N, 1 or Q, 1 or S] broadcastable to [K, N / K · Q, S]."""
        heads, q, s = x.shape
        if self.heads == self.groups or heads == q == 1:
            return x
        x = jnp.broadcast_to(x, (self.heads, self.sizes.q, s))
        return x.reshape(self.groups, -1, s)

    @staticmethod
    def _numbers(number: jax.Array, size: int) -> jax.Array:
        return number * size + np.arange(size, dtype=np.int32)


def _wide(x: jax.Array) -> Any:
    return np.promote_types(x.dtype, np.float32)


def _block(x: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, number, keepdims=False)


def _updated(x: jax.Array, block: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, block, number, 0)


def _added(x: jax.Array, block: jax.Array, number: jax.Array) -> jax.Array:
    return _updated(x, _block(x, number) + block, number)


def _product(x: jax.Array, y: jax.Array, axis: int, transposed: bool = False) -> jax.Array:
    """Return the product of [K, m, n], or its transpose, with [K, ...], contracted over that axis of `y`."""
    numbers = (((1 if transposed else 2,), (axis,)), ((0,), (0,)))
    return lax.dot_general(x, y, numbers, preferred_element_type=_wide(x))
