"""What is computed by attention besides its queries, keys and values: static options, and arrays that may be absent."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax


class Options(NamedTuple):
    """The static part of attention.

    Attributes:
      scale: Factor of the scores.
      causal: Whether a query attends only to keys at its own position and before.
      window: Number of positions up to its own that a causal query attends to; None for all.
      softcap: Bound c of the scaled scores, which become c · tanh(score / c); None for none.
      dropout: Rate at which weights are dropped; 0 without a key.
      whole: T and S of the attention of which this is a part; its dropout mask is the part of the whole mask at the
        positions, and its gradients are computed from the output and the statistics of all parts. None if this is the
        whole.
      precision: That of products of float32, as for `jax.default_matmul_precision`; None for JAX's default. A program
        is lowered after it is traced, when the setting no longer holds.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    whole: tuple[int, int] | None = None
    precision: str | None = None


class Operands(NamedTuple):
    """The arrays of attention other than q [B, T, N, H], k [B, S, K, H] and v [B, S, K, V]; None for those it has not.

    The first axis of each may be 1 instead of B.

    Attributes:
      mask: bool, broadcastable to [B, N, T, S], True where a query attends to a key.
      bias: Added to the scores, broadcastable to [B, N, T, S].
      sinks: Scores of one more key for each head, whose value is 0, [B, N].
      q_segments: int [B, T]: a query attends to the keys of its own segment.
      k_segments: int [B, S].
      q_positions: int [B, T], which `causal` and `window` compare; None for 0 … T − 1.
      k_positions: int [B, S].
      rng: Counters of the dropout mask, uint32 [B, 3]: the key's two words, and the row in the mask of that key.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None
    q_positions: jax.Array | None = None
    k_positions: jax.Array | None = None
    rng: jax.Array | None = None

    def split(self) -> tuple[tuple[str, ...], list[Any]]:
        """Return the names of the arrays that there are, and the arrays."""
        found = {name: x for name, x in self._asdict().items() if x is not None}
        return (*found,), [*found.values()]

    @classmethod
    def joined(cls, given: tuple[str, ...], arrays: Sequence[Any]) -> tuple["Operands", Sequence[Any]]:
        """Undo `split`, and return the arrays that follow."""
        return cls(**dict(zip(given, arrays, strict=False))), arrays[len(given) :]

    def differentiable(self) -> dict[str, Any]:
        """Return the arrays that have gradients, by name."""
        return {name: x for name in ("bias", "sinks") if (x := getattr(self, name)) is not None}
