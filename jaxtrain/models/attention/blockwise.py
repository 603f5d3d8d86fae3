"""Attention block by block, in memory linear in the length (Rabe and Staats 2021, Dao et al. 2022).

The forward pass keeps the largest score and the sum of the weights of every query (the online softmax of Milakov and
Gimelshein 2018) and returns the logarithm of the sum of exponentials. With it the backward pass computes the weights of
a block again. One loop runs over the pairs of blocks that have anything to compute (`blocks`), whose number may be
known only at run time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.block_arrays import BlockArrays, block_of, product, wide
from jaxtrain.models.attention.block_pairs import Pairs, Sizes, visible_pairs, visible_pairs_by_row
from jaxtrain.program import at_most

Q_BLOCK, K_BLOCK = 128, 128
"""Numbers of queries, those of all query heads of a key head, and of keys of a block. Measured on two cores: 4 rows of
2,048 tokens, 4 heads of 32, causal, forward and backward take 190 to 225 ms of processor time (blocks of 256 × 128: 190
to 207, 128 × 256: 183 to 240, 256 × 256: 250 to 330), PyTorch 175 to 198. Steps of all heads, whose blocks exceed the
cache, with gradients of keys and values that are not transposed take 290. The loop runs on one core, PyTorch's kernel
on all: XLA:CPU divides single operations, and those of a block are too small."""


def block_sizes(q: jax.Array, k: jax.Array) -> tuple[int, int]:
    """Return the numbers of queries and keys of a block for q [B, T, N, H] and k [B, S, K, H]."""
    return max(32, Q_BLOCK // (q.shape[2] // k.shape[2])), K_BLOCK


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
    blocks: tuple[int, int] | None = None,
    by_row: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute attention and the logarithm of the sum of the exponentials of every query's scores.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H], where K divides N.
      v: Values [B, S, K, V].
      operands: The other arrays.
      blocks: Numbers of queries and of keys of a block, approximately; None for `block_sizes`.
      by_row: Whether each step of the loop computes one pair of blocks of every row and head, so that the rows can be
        divided over devices, instead of one pair of one row and one key head.

    Returns:
      The output [B, T, N, V], the logarithms [B, N, T] and what they lack by rounding [B, N, T], in float32 at least.
      For a query that attends to no key they are 0, -inf and 0. Outputs over disjoint keys are combined in proportion
      to the exponentials of the logarithms.
    """
    sizes = Sizes.divided(q.shape[1], k.shape[1], *(blocks or block_sizes(q, k)))
    compute = _over_rows(_forward_rows, options, sizes, operands, by_row, len(q))
    out, lse, rest = compute(operands._replace(sinks=None), q, k, v)
    if operands.sinks is None:
        return out, lse, rest
    sinks = operands.sinks.astype(lse.dtype)[:, :, None]
    larger, added = jnp.maximum(lse, sinks), jnp.log1p(jnp.exp(-jnp.abs(lse - sinks + rest)))
    total = larger + added
    more = (larger - total) + added + jnp.where(lse < sinks, 0, rest)
    return out * jnp.exp((lse - total) + (rest - more)).swapaxes(1, 2)[..., None], total, more


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
    blocks: tuple[int, int] | None = None,
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
    sizes = Sizes.divided(q.shape[1], k.shape[1], *(blocks or block_sizes(q, k)))
    lse = lse.astype(wide(q))
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

        def in_one_loop(operands: Operands, q: jax.Array, k: jax.Array, *arrays: jax.Array) -> Any:
            return fn(BlockArrays(options, sizes, pairs, pairs.count, operands, q, k, k.shape[2]), q, k, *arrays)

        return in_one_loop
    pairs = visible_pairs_by_row(options, sizes, rows, operands)
    # The loop runs for the row with the most pairs: a batched trip count would copy what the loop carries.
    count = pairs.count.max()
    count = int(count) if isinstance(count, np.integer) else count

    def one(pairs: Pairs, operands: Operands, *arrays: jax.Array) -> Any:
        q, k, *others = (x[None] for x in arrays)
        outs = fn(BlockArrays(options, sizes, pairs, count, operands, q, k, 1), q, k, *others)
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
    block: BlockArrays, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, keys, values = block.split_queries(q), block.split_keys(k), block.split_keys(v)
    dtype, lead = wide(q), queries.shape[:-1]
    # The largest score and the sum of a query are one array: of two, XLA would copy the first in every step.
    start = jnp.array([jnp.finfo(dtype).min, 0], dtype)
    init = jnp.broadcast_to(start.reshape(1, 1, 1, 2), (*lead, 2)), jnp.zeros((*lead, v.shape[-1]), dtype)

    def step(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = block.at(i)
        scores = block.scores(at, queries, keys).masked
        (statistics, summed) = (block_of(x, at.q) for x in carry)
        largest, total = statistics[..., :1], statistics[..., 1:]
        new = jnp.maximum(largest, scores.max(-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(largest - new)
        statistics = jnp.concatenate([new, total * old + weights.sum(-1, keepdims=True)], axis=-1)
        dropped = block.dropped(at, weights).astype(v.dtype)
        summed = summed * old + product(dropped, block_of(values, at.k), 1)
        return _updated(carry[0], statistics, at.q), _updated(carry[1], summed, at.q)

    with at_most(block.most_steps):
        statistics, summed = lax.fori_loop(0, block.steps, step, init)
    largest, total = statistics[..., :1], statistics[..., 1:]
    logarithm = jnp.log(jnp.where(total == 0, 1, total))
    lse = jnp.where(total == 0, -jnp.inf, largest + logarithm)
    rest = jnp.where(total == 0, 0, (largest - lse) + logarithm)
    out = summed / jnp.where(total == 0, 1, total)
    lse, rest = (block.joined_queries(x)[..., 0].swapaxes(1, 2) for x in (lse, rest))
    return block.joined_queries(out), lse, rest


def _backward_rows(
    block: BlockArrays,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cotangent: jax.Array,
    lse: jax.Array,
    weighted: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    queries, keys, values = block.split_queries(q), block.split_keys(k), block.split_keys(v)
    given = block.split_queries(cotangent.astype(v.dtype))
    # XLA:CPU multiplies by the transpose of the weights half as fast: the gradients of keys and values are transposed.
    turned_queries, turned = queries.swapaxes(-1, -2), given.swapaxes(-1, -2)
    # The weights of a query without keys, and of one that pads a block, are 0.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse).swapaxes(1, 2)[..., None]
    lse = block.split_queries(lse, padding=jnp.inf)
    weighted = block.split_queries(weighted.swapaxes(1, 2)[..., None])
    dtype = wide(q)
    init = [jnp.zeros(x.shape, dtype) for x in (queries, keys.swapaxes(-1, -2), values.swapaxes(-1, -2))]
    bias, scale = block.operands.bias, block.options.scale
    init += [] if bias is None else [jnp.zeros(bias.shape, dtype)]

    def weigh(i: Any, carry: jax.Array) -> jax.Array:
        at = block.at(i)
        weights = jnp.exp(block.scores(at, queries, keys).masked - block_of(lse, at.q))
        of_weights = block.dropped(at, product(block_of(given, at.q), block_of(values, at.k), 2))
        return _added(carry, (weights * of_weights).sum(-1, keepdims=True), at.q)

    if bias is not None and v.dtype != dtype and block.options.whole is None:
        # The rounding of the output would be most of the error of these gradients, which PyTorch computes in float32.
        with at_most(block.most_steps):
            weighted = lax.fori_loop(0, block.steps, weigh, jnp.zeros_like(weighted))

    def step(i: Any, carry: list[jax.Array]) -> list[jax.Array]:
        at = block.at(i)
        scores = block.scores(at, queries, keys)
        weights = jnp.exp(scores.masked - block_of(lse, at.q))
        of_out = block_of(given, at.q)
        dv = product(block_of(turned, at.q), block.dropped(at, weights).astype(v.dtype), 1)
        of_weights = block.dropped(at, product(of_out, block_of(values, at.k), 2))
        of_scores = weights * (of_weights - block_of(weighted, at.q))
        added = [] if bias is None else [block.bias_with(at, carry[3], of_scores)]
        of_scores = of_scores * (scale if scores.slope is None else scores.slope * scale)
        of_scores = of_scores.astype(q.dtype)
        dq, dk = product(of_scores, block_of(keys, at.k), 1), product(block_of(turned_queries, at.q), of_scores, 1)
        return [_added(carry[0], dq, at.q), _added(carry[1], dk, at.k), _added(carry[2], dv, at.k), *added]

    with at_most(block.most_steps):
        dq, dk, dv, *dbias = lax.fori_loop(0, block.steps, step, init)
    dk, dv = (block.joined_keys(x.swapaxes(-1, -2)) for x in (dk, dv))
    return block.joined_queries(dq), dk, dv, dbias[0][..., : block.sizes.t, : block.sizes.s] if dbias else None


def _updated(x: jax.Array, block: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, block, number, 0)


def _added(x: jax.Array, block: jax.Array, number: jax.Array) -> jax.Array:
    return _updated(x, block_of(x, number) + block, number)
