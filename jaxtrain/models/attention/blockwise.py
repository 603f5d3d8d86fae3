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

from jaxtrain.models.attention.block_arrays import BlockArrays, block_of, product, wide
from jaxtrain.models.attention.blocks import Pairs, Sizes, visible_pairs, visible_pairs_by_row
from jaxtrain.models.attention.options import Operands, Options
from jaxtrain.transforms import at_most

Q_BLOCK, K_BLOCK = 128, 128
"""Numbers of queries and of keys of a block. Measured on two cores: 4 rows of 1,024 tokens, 4 heads of 32, causal,
forward and backward take 72 ms of processor time (blocks of 64 × 64: 76, 128 × 256: 82, 256 × 256: 101); the formula
takes 729 (without `keep_host_memory`), PyTorch 56. The loop runs on one core, PyTorch's kernel on all."""


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
    block = BlockArrays(options, sizes, pairs, count, operands, q, k)
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

    with at_most(pairs.index.shape[0]):
        statistics, summed = lax.fori_loop(0, count, step, init)
    largest, total = statistics[..., :1], statistics[..., 1:]
    lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))
    out = summed / jnp.where(total == 0, 1, total)
    return block.joined_queries(out), block.joined_queries(lse)[..., 0].swapaxes(1, 2)


def _backward_rows(
    options: Options, sizes: Sizes, pairs: Pairs, count: Any, operands: Operands, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    q, k, v, cotangent, lse, weighted = arrays
    block = BlockArrays(options, sizes, pairs, count, operands, q, k)
    queries, keys, values, given = (
        *(block.split_queries(q), block.split_keys(k), block.split_keys(v)),
        block.split_queries(cotangent.astype(v.dtype)),
    )
    # The weights of a query without keys, and of one that pads a block, are 0.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse).swapaxes(1, 2)[..., None]
    lse = block.split_queries(lse, padding=jnp.inf)
    weighted = block.split_queries(weighted.swapaxes(1, 2)[..., None])
    dtype = wide(q)
    init = [jnp.zeros(x.shape, dtype) for x in (queries, keys, values)]
    bias = block.operands.bias
    init += [] if bias is None else [jnp.zeros(bias.shape, dtype)]

    def step(i: Any, carry: list[jax.Array]) -> list[jax.Array]:
        at = block.at(i)
        scores = block.scores(at, queries, keys)
        weights = jnp.exp(scores.masked - block_of(lse, at.q))
        of_out = block_of(given, at.q)
        dv = product(block.dropped(at, weights).astype(v.dtype), of_out, 1, transposed=True)
        of_weights = block.dropped(at, product(of_out, block_of(values, at.k), 2))
        of_scores = weights * (of_weights - block_of(weighted, at.q))
        added = [] if bias is None else [block.bias_with(at, carry[3], of_scores)]
        of_scores = of_scores * options.scale if scores.slope is None else of_scores * (scores.slope * options.scale)
        of_scores = of_scores.astype(q.dtype)
        dq, dk = product(of_scores, block_of(keys, at.k), 1), product(of_scores, block_of(queries, at.q), 1, True)
        return [_added(carry[0], dq, at.q), _added(carry[1], dk, at.k), _added(carry[2], dv, at.k), *added]

    with at_most(pairs.index.shape[0]):
        dq, dk, dv, *dbias = lax.fori_loop(0, count, step, init)
    joined = block.joined_queries(dq), block.joined_keys(dk), block.joined_keys(dv)
    if operands.bias is None:
        return *joined, None
    t, s = operands.bias.shape[2:]
    return *joined, dbias[0][..., :t, :s]


def _updated(x: jax.Array, block: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, block, number, 0)


def _added(x: jax.Array, block: jax.Array, number: jax.Array) -> jax.Array:
    return _updated(x, block_of(x, number) + block, number)
