"""The blocks of queries and keys of an attention, and the pairs of them that have anything to compute."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.attention.attention_options import Operands, Options

_BINS = 128
"""Bins of segments. Two blocks with segments in a common bin are taken to have a common segment."""


class Sizes(NamedTuple):
    """Division of queries and keys into blocks.

    Attributes:
      t: Number of queries.
      s: Number of keys.
      q: Queries of a block.
      k: Keys of a block.
    """

    t: int
    s: int
    q: int
    k: int

    @property
    def q_blocks(self) -> int:
        """Number of blocks of queries."""
        return -(-self.t // self.q)

    @property
    def k_blocks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.s // self.k)

    @classmethod
    def divided(cls, t: int, s: int, q: int, k: int) -> "Sizes":
        """Return equal blocks of at most about `q` queries and `k` keys, so that little is padded.

        >>> Sizes.divided(1025, 100, 256, 512)
        Sizes(t=1025, s=100, q=208, k=104)
        """
        return cls(t, s, *(_multiple_of_8(-(-n // -(-n // size))) for n, size in ((t, q), (s, k))))


def _multiple_of_8(n: int) -> int:
    return -(-n // 8) * 8


class Pairs(NamedTuple):
    """The pairs of blocks that are computed, in the order of the rows and of their queries.

    Attributes:
      index: int32 [P, 3]: row, block of queries, block of keys; with an axis of rows in front if each has its own.
      count: Number of pairs in use, int or int32 []; with own pairs for each row, int32 [B].
    """

    index: Any
    count: Any


def visible_pairs(options: Options, sizes: Sizes, rows: int, operands: Operands) -> Pairs:
    """Return the pairs of blocks of all rows in which a query attends to a key."""
    seen = _visible(options, sizes, operands)
    if isinstance(seen, np.ndarray):
        index = np.argwhere(np.broadcast_to(seen, (rows, *seen.shape[1:]))).astype(np.int32)
        return Pairs(index, len(index))
    return _listed(jnp.broadcast_to(seen, (rows, *seen.shape[1:])), rows * _most(options, sizes, operands))


def visible_pairs_by_row(options: Options, sizes: Sizes, rows: int, operands: Operands) -> Pairs:
    """Return the pairs of blocks of each row, whose rows are all 0."""
    seen = _visible(options, sizes, operands)
    if isinstance(seen, np.ndarray):
        index = np.argwhere(seen).astype(np.int32)
        return Pairs(np.broadcast_to(index, (rows, *index.shape)), np.full(rows, len(index), np.int32))
    most = _most(options, sizes, operands)
    return jax.vmap(lambda row: _listed(row[None], most))(jnp.broadcast_to(seen, (rows, *seen.shape[1:])))


def visible_ranges(options: Options, sizes: Sizes, operands: Operands, *, of_queries: bool = False) -> tuple[Any, Any]:
    """Return the blocks of keys among which a block of queries finds all that it attends to.

    Args:
      options: What is computed.
      sizes: The blocks.
      operands: The arrays.
      of_queries: Whether to return the blocks of queries that attend to each block of keys instead.

    Returns:
      The first block and the one after the last, int32 [1 or B, blocks]; equal where there is none.

    Example:
      >>> visible_ranges(Options(1.0, causal=True, window=2), Sizes(8, 8, 2, 2), Operands())
      (array([[0, 0, 1, 2]], dtype=int32), array([[1, 2, 3, 4]], dtype=int32))
    """
    seen = _visible(options, sizes, operands, by_bins=False)
    seen = seen.swapaxes(1, 2) if of_queries else seen
    is_seen = seen.any(-1).astype(np.int32)
    first, after_last = (x.argmax(-1).astype(np.int32) for x in (seen, seen[..., ::-1]))
    return first * is_seen, (np.int32(seen.shape[-1]) - after_last) * is_seen


def _listed(seen: jax.Array, most: int) -> Pairs:
    index = jnp.stack(jnp.nonzero(seen, size=most, fill_value=0), axis=-1).astype(np.int32)
    return Pairs(index, seen.sum(dtype=np.int32))


def _most(options: Options, sizes: Sizes, operands: Operands) -> int:
    """Return the number of pairs of a row in which a query may attend to a key, whatever the segments are."""
    seen = _visible(options, sizes, operands._replace(q_segments=None, k_segments=None))
    return int(seen.sum()) if isinstance(seen, np.ndarray) else sizes.q_blocks * sizes.k_blocks


def _visible(options: Options, sizes: Sizes, operands: Operands, by_bins: bool = True) -> Any:
    """Return bool [1 or B, blocks of queries, blocks of keys]: False where a pair of blocks is known to be masked.

    A NumPy array if it is known when the program is traced. By their bins blocks are told apart whose segments overlap
    but are not in order.
    """
    seen: Any = np.ones((1, sizes.q_blocks, sizes.k_blocks), bool)
    if options.causal:
        (q_first, q_last), (k_first, k_last) = (
            _bounds(_positions(given, n), block)
            for given, n, block in (
                (operands.q_positions, sizes.t, sizes.q),
                (operands.k_positions, sizes.s, sizes.k),
            )
        )
        seen = seen & (q_last[:, :, None] >= k_first[:, None])
        if options.window is not None:
            seen = seen & (q_first[:, :, None] - k_last[:, None] < options.window)
    if operands.q_segments is not None and operands.k_segments is not None:
        segments = (operands.q_segments, sizes.q), (operands.k_segments, sizes.k)
        (q_low, q_high), (k_low, k_high) = (_bounds(x, block) for x, block in segments)
        seen = seen & (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
        if by_bins:
            q_bins, k_bins = (_bins(x, block) for x, block in segments)
            seen = seen & (jnp.einsum("rqb,rkb->rqk", q_bins, k_bins) > 0)
    return seen


def _positions(given: jax.Array | None, n: int) -> Any:
    return np.arange(n, dtype=np.int32)[None] if given is None else given.astype(np.int32)


def _bounds(x: Any, block: int) -> tuple[Any, Any]:
    """Return the smallest and the largest number of each block of [B, T]."""
    parts = _blocks(x, block)
    return parts.min(-1), parts.max(-1)


def _bins(x: jax.Array, block: int) -> jax.Array:
    """Return float32 [B, blocks, bins]: 1 where a block has a segment of that bin."""
    found = (_blocks(x, block) % _BINS)[..., None] == np.arange(_BINS).astype(x.dtype).reshape(1, 1, 1, -1)
    return found.any(2).astype(np.float32)


def _blocks(x: Any, block: int) -> Any:
    """Return [B, T] as [B, blocks, block], its last number repeated."""
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    padded = numpy.pad(x, ((0, 0), (0, -x.shape[1] % block)), mode="edge")
    return padded.reshape(len(x), -1, block)
