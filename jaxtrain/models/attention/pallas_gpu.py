"""Attention by kernels of our own for GPUs (Dao 2023), where cuDNN has none.

`jax.experimental.pallas.ops.gpu.attention` has neither soft cap, sinks, dropout, window nor a bias, and needs lengths
that are multiples of its blocks and as many key heads as query heads.

The kernels read and write the arrays as they are, without a copy in another order. Of the forward pass, one runs for
each block of queries, each row and each head; of the backward pass, one for each of these computes the gradient of the
queries, and one for each block of keys those of the keys and values, so that no two add to the same number and the
gradients are the same in every run. A kernel visits the blocks between the first and the last that its own can meet.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.block_pairs import Sizes, visible_ranges
from jaxtrain.models.attention.pallas_tiles import Place, Problem, Tiles, loop

WIDEST = 256
"""Width of the widest heads whose blocks fit a GPU's registers."""


class Blocks(NamedTuple):
    """Numbers of queries and of keys of a block, and the warps and stages of a kernel that computes it."""

    q: int
    k: int
    warps: int = 4
    stages: int = 2


class Schedule(NamedTuple):
    """The blocks of the kernels of the output, of the gradient of q, of those of k and v, and of that of a bias."""

    forward: Blocks
    queries: Blocks
    keys: Blocks
    bias: Blocks


def schedule_of(dtype: Any, width: int) -> Schedule:
    """Return the blocks for heads of a width, which have not been timed: those that fit a GPU's registers."""
    if np.dtype(dtype).itemsize > 2:
        size = 32 if width <= 128 else 16
        return Schedule(*[Blocks(size, size)] * 4)
    if width <= 64:
        return Schedule(Blocks(128, 64, 8), Blocks(64, 64), Blocks(64, 64), Blocks(64, 64, 8))
    if width <= 128:
        return Schedule(Blocks(128, 64, 8), Blocks(64, 32), Blocks(32, 64), Blocks(64, 64, 8))
    return Schedule(Blocks(32, 32), Blocks(32, 32), Blocks(32, 32), Blocks(32, 16))


def has_kernel(capability: tuple[int, int], q: Any, k: Any, v: Any, operands: Operands) -> bool:
    """Return whether there are kernels, forward and backward, for GPUs of a compute capability."""
    bias, whole = operands.bias, (q.shape[1], k.shape[1])
    is_one_dtype = q.dtype == k.dtype == v.dtype and q.dtype.name in ("bfloat16", "float16", "float32")
    fits = max(q.shape[-1], v.shape[-1]) <= WIDEST and (bias is None or bias.shape[2:] == whole)
    return is_one_dtype and fits and capability >= (8, 0) and _is_lowered(capability)


def _is_lowered(capability: tuple[int, int]) -> bool:
    """Return whether the installed JAX lowers kernels for these GPUs: since 0.11.1 for the process's only."""
    gpu_info: Any = getattr(triton, "get_gpu_info", None)
    try:
        return gpu_info is None or divmod(gpu_info().compute_capability, 10) == capability
    except ValueError:  # for a GPU that it does not know, or none
        return False


def forward(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
    *,
    schedule: Schedule | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention and the logarithm of the sum of the exponentials of every query's scores.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, V].
      operands: The other arrays.
      schedule: The blocks; None for those of the dtype and the width.
      interpret: Whether JAX computes what the kernel would, on any device.

    Returns:
      The output [B, T, N, V], in the dtype of the values, and the logarithms [B, N, T], in float32 at least. For a
      query that attends to no key they are 0 and -inf.
    """
    schedule = schedule or schedule_of(q.dtype, max(q.shape[-1], v.shape[-1]))
    run = _runner(options, q, k, v, operands, interpret)
    (b, t, n, _), wide = q.shape, np.promote_types(q.dtype, np.float32)
    arrays = {"q": q, "k": k, "v": v, **_given(operands)}
    if operands.sinks is not None:
        arrays["sinks"] = operands.sinks.astype(wide)
    like = {"out": ((b, t, n, v.shape[-1]), v.dtype), "lse": ((b, n, t), wide)}
    out, lse = run(_attend, schedule.forward, arrays, like, lambda sizes: (sizes.q_blocks, n, b))
    return out, lse


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
    schedule: Schedule | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Compute the gradients of q, k, v and of the bias and the sinks if given.

    Args:
      options: As for `forward`.
      q: As for `forward`.
      k: As for `forward`.
      v: As for `forward`.
      operands: As for `forward`.
      out: Output [B, T, N, V].
      lse: Logarithms [B, N, T].
      cotangent: Gradient of the output [B, T, N, V].
      schedule: As for `forward`.
      interpret: As for `forward`.
    """
    schedule = schedule or schedule_of(q.dtype, max(q.shape[-1], v.shape[-1]))
    run = _runner(options, q, k, v, operands, interpret)
    (b, _, n, _), heads = q.shape, k.shape[2]
    weighted = (cotangent.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1).swapaxes(1, 2)
    arrays = {"q": q, "k": k, "v": v, **_given(operands), "cotangent": cotangent.astype(v.dtype), "weighted": weighted}
    arrays["lse"] = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # the weights of a query without keys are 0
    like = {"dq": (q.shape, q.dtype)}
    grads = run(_differentiate_queries, schedule.queries, arrays, like, lambda sizes: (sizes.q_blocks, n, b))
    like = {"dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}
    grads += run(_differentiate_keys, schedule.keys, arrays, like, lambda sizes: (sizes.k_blocks, heads, b))
    if (bias := operands.bias) is not None:
        parts, like = bias.shape[0] * bias.shape[1], {"dbias": (bias.shape, bias.dtype)}
        grid = lambda sizes: (sizes.k_blocks, sizes.q_blocks, parts)  # noqa: E731
        grads += run(_differentiate_bias, schedule.bias, arrays, like, grid)
    if (sinks := operands.sinks) is not None:
        shared = -(jnp.exp(sinks.astype(lse.dtype)[:, :, None] - lse) * weighted).sum(-1)
        shared = shared if len(sinks) == b else shared.sum(0, keepdims=True)
        grads.append(shared.astype(sinks.dtype))
    return grads


def _given(operands: Operands) -> dict[str, jax.Array]:
    return {name: x for name, x in operands._asdict().items() if x is not None and name != "sinks"}


def _runner(
    options: Options, q: Any, k: Any, v: Any, operands: Operands, interpret: bool
) -> Callable[..., list[jax.Array]]:
    """Return a function that runs a kernel on arrays by name and returns arrays of given shapes and dtypes."""
    (b, t, n, width), (_, s, heads, value_width) = q.shape, v.shape
    wide = np.promote_types(q.dtype, np.float32)
    names = {"q": width, "k": width, "dq": width, "dk": width}
    names |= dict.fromkeys(("v", "cotangent", "out", "dv"), value_width)

    def spec(name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return a block that is the whole array, whose last axis is a power of 2 where a tile has all of it."""
        block = (*shape[:-1], _padded(names[name])) if name in names else shape
        return pl.BlockSpec(block, lambda *_: (0,) * len(shape))

    def run(kernel: Any, blocks: Blocks, arrays: Any, like: Any, grid: Callable[[Sizes], Any]) -> list[jax.Array]:
        sizes = Sizes(t, s, min(blocks.q, _padded(t)), min(blocks.k, _padded(s)))
        problem = Problem(options, sizes, b, n, heads, width, value_width, wide)
        of_queries = kernel is _differentiate_keys
        first, stop = visible_ranges(options, sizes, operands, of_queries=of_queries)
        arrays = {**arrays, "first": jnp.asarray(first), "stop": jnp.asarray(stop)}

        def attention(ins: Any, outs: Any) -> None:
            kernel(Tiles(problem, {**ins, **outs}, is_transposed=of_queries))

        outs = pl.pallas_call(
            attention,
            out_shape={name: jax.ShapeDtypeStruct(*x) for name, x in like.items()},
            grid=grid(sizes),
            in_specs=[{name: spec(name, x.shape) for name, x in arrays.items()}],
            out_specs={name: spec(name, x[0]) for name, x in like.items()},
            compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(arrays)
        return [outs[name] for name in like]

    return run


def _padded(n: int) -> int:
    """Return the power of 2 to which a size is padded, at least that of the smallest product.

    >>> _padded(5), _padded(80), _padded(128)
    (16, 128, 128)
    """
    return max(16, pl.next_power_of_2(n))


def _range(tiles: Tiles, number: Any, row: Any) -> tuple[Any, Any]:
    first, stop = tiles.refs["first"], tiles.refs["stop"]
    row = jnp.minimum(row, first.shape[0] - 1)
    return first[row, number], stop[row, number]


def _attend(tiles: Tiles) -> None:
    """Compute the output and the logarithms of a block of queries (Milakov and Gimelshein 2018)."""
    problem, sizes = tiles.problem, tiles.sizes
    number, head, row = (pl.program_id(i) for i in range(3))
    at = Place(row, head, number * sizes.q, np.int32(0))
    q, wide = tiles.queries("q", at), problem.wide
    largest, total = jnp.full(sizes.q, jnp.finfo(wide).min, wide), jnp.zeros(sizes.q, wide)
    if "sinks" in tiles.refs:
        largest, total = jnp.full(sizes.q, tiles.sink(at), wide), jnp.ones(sizes.q, wide)
    summed = jnp.zeros((sizes.q, _padded(problem.value_width)), wide)

    def step(i: Any, carry: Any) -> Any:
        largest, total, summed = carry
        here = at._replace(k=i * sizes.k)
        scores, _ = tiles.scores(here, q, tiles.keys("k", here))
        new = jnp.maximum(largest, scores.max(-1))
        weights, old = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
        v = tiles.keys("v", here)
        added = tiles.product(tiles.dropped(here, weights).astype(v.dtype), v)
        return new, total * old + weights.sum(-1), summed * old[:, None] + added

    largest, total, summed = loop(*_range(tiles, number, row), step, (largest, total, summed))
    seen = total > 0
    total = jnp.where(seen, total, 1)
    tiles.store_queries("out", at, summed / total[:, None])
    tiles.store_column("lse", at, jnp.where(seen, largest + jnp.log(total), -jnp.inf))


class _Of(NamedTuple):
    """The parts of a tile's queries that its gradients are computed from."""

    q: jax.Array
    cotangent: jax.Array
    lse: jax.Array
    weighted: jax.Array

    @classmethod
    def queries(cls, tiles: Tiles, at: Place) -> "_Of":
        q, cotangent = tiles.queries("q", at), tiles.queries("cotangent", at)
        return cls(q, cotangent, tiles.column("lse", at, jnp.inf), tiles.column("weighted", at, 0))


def _gradients(tiles: Tiles, at: Place, of: _Of, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Return the weights, and the gradients of the biased scores and of the products of queries and keys."""
    scores, slope = tiles.scores(at, of.q, k)
    weights = jnp.exp(scores - of.lse)
    of_weights = tiles.dropped(at, tiles.products(of.cotangent, v))
    of_scores = weights * (of_weights - of.weighted)
    scale = tiles.options.scale
    of_products = of_scores * scale if slope is None else of_scores * (slope * scale)
    return weights, of_scores, of_products.astype(of.q.dtype)


def _differentiate_queries(tiles: Tiles) -> None:
    """Compute the gradient of a block of queries."""
    number, head, row = (pl.program_id(i) for i in range(3))
    at = Place(row, head, number * tiles.sizes.q, np.int32(0))
    of = _Of.queries(tiles, at)

    def step(i: Any, dq: jax.Array) -> jax.Array:
        here = at._replace(k=i * tiles.sizes.k)
        k, v = tiles.keys("k", here), tiles.keys("v", here)
        return dq + tiles.product(_gradients(tiles, here, of, k, v)[2], k)

    init = jnp.zeros(of.q.shape, tiles.problem.wide)
    tiles.store_queries("dq", at, loop(*_range(tiles, number, row), step, init))


def _differentiate_keys(tiles: Tiles) -> None:
    """Compute the gradients of a block of keys and values, to which all heads of a group add."""
    problem, sizes = tiles.problem, tiles.sizes
    number, key_head, row = (pl.program_id(i) for i in range(3))
    members = problem.heads // problem.groups
    at = Place(row, key_head * members, np.int32(0), number * sizes.k)
    k, v = tiles.keys("k", at), tiles.keys("v", at)
    first, stop = _range(tiles, number, row)

    def of_head(member: Any, carry: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            dk, dv = carry
            here = at._replace(head=at.head + member, q=i * sizes.q)
            of = _Of.queries(tiles, here)
            weights, _, of_products = _gradients(tiles, here, of, k, v)
            dv = dv + tiles.product(tiles.dropped(here, weights).astype(v.dtype), of.cotangent)
            return dk + tiles.product(of_products, of.q), dv

        return loop(first, stop, step, carry)

    init = jnp.zeros(k.shape, problem.wide), jnp.zeros(v.shape, problem.wide)
    dk, dv = loop(0, members, of_head, init) if members > 1 else of_head(np.int32(0), init)
    tiles.store_keys("dk", at, dk)
    tiles.store_keys("dv", at, dv)


def _differentiate_bias(tiles: Tiles) -> None:
    """Compute the gradient of a tile of the bias, to which all rows and heads add for which it is the same."""
    problem, sizes = tiles.problem, tiles.sizes
    k_number, q_number, part = (pl.program_id(i) for i in range(3))
    rows, heads = tiles.refs["bias"].shape[:2]
    own_row, own_head = lax.div(part, np.int32(heads)), lax.rem(part, np.int32(heads))
    at = Place(own_row, own_head, q_number * sizes.q, k_number * sizes.k)

    def of_pair(i: Any, total: jax.Array) -> jax.Array:
        head = own_head if heads > 1 else lax.rem(i, np.int32(problem.heads))
        row = own_row if rows > 1 else (i if heads > 1 else lax.div(i, np.int32(problem.heads)))
        first, stop = _range(tiles, q_number, row)
        here = at._replace(row=row, head=head)

        def add(_: Any, total: jax.Array) -> jax.Array:
            k, v = tiles.keys("k", here), tiles.keys("v", here)
            return total + _gradients(tiles, here, _Of.queries(tiles, here), k, v)[1]

        is_seen = (first <= k_number) & (k_number < stop)
        return loop(0, is_seen, add, total)

    shared = (1 if rows > 1 else problem.rows) * (1 if heads > 1 else problem.heads)
    init = jnp.zeros((sizes.q, sizes.k), problem.wide)
    tiles.store_bias(own_row, own_head, at, loop(0, shared, of_pair, init))
