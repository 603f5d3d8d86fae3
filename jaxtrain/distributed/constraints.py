"""Sharding constraints on the arrays of a program: which of their axes are rows, and which are tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import FSDP, ROWS, SEQUENCE, TENSOR, sequence_parallel_size
from jaxtrain.distributed.sharding import fit_spec
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class ShardingConstraints:
    """Sharding constraints for the arrays of a program on a mesh.

    Attributes:
      mesh: The mesh.
      count: Number of rows of the batch; None, or a number that is not divisible, disables the constraints.
      lengths: Lengths of the sequences whose tokens are sharded.
      row_axes: The mesh axes that shard rows.

    Raises:
      UserError: A length is not divisible by the devices of the sequence axis.
    """

    mesh: Mesh
    count: int | None
    lengths: frozenset[int] = frozenset()
    row_axes: tuple[str, ...] = ROWS

    def __post_init__(self) -> None:
        n = sequence_parallel_size(self.mesh.shape)
        for length in sorted(self.lengths):
            if length % n:
                raise UserError(
                    f"a sequence of {length} tokens is not divisible by the {n} devices of {SEQUENCE}: "
                    f"use a multiple of {n}, or another mesh"
                )

    def __call__(self, x: Any) -> Any:
        """Shard the rows of `x` [B, …], and its tokens if it has any; replicate its other axes."""
        if not self._has_rows(x):
            return x
        return self._constrain(x, {0: self._rows, **self._token_axis(x)}, None)

    def token_spec(self, x: Any) -> P | None:
        """Return the mesh axes of the rows of `x` [B, T, …] and of its tokens; None if it has no rows."""
        if not self._has_rows(x):
            return None
        divides_tokens = x.ndim > 2 and x.shape[1] in self.lengths
        return P(self._rows, SEQUENCE if divides_tokens else None)

    def constrain_batch(self, x: Any) -> Any:
        """Shard an array of a batch, [B, …] or [B, T, …]."""
        if not self._has_rows(x):
            return x
        n = sequence_parallel_size(self.mesh.shape)
        divides = n > 1 and x.ndim > 1 and x.shape[1] % n == 0
        return self._constrain(x, {0: self._rows, 1: SEQUENCE} if divides else {0: self._rows}, None)

    def constrain_tokens(self, x: Any) -> Any:
        """Shard the embeddings of tokens, [B, T, …]."""
        return self(x) if self.lengths and self._has_rows(x) else x

    def constrain_scores(self, x: Any, over: tuple[int, ...]) -> Any:
        """Shard attention scores [B, …, T, S] by queries, so that keys and values are gathered.

        `over` are the axes of the softmax, the keys.
        """
        queries = [i for i in range(1, x.ndim) if x.shape[i] in self.lengths and i not in over]
        if x.ndim < 4 or not queries or {x.shape[i] for i in over} - {*self.lengths}:
            return x
        return self._constrain_axes(x, {queries[-1]: SEQUENCE, **dict.fromkeys(over)})

    def run_fused(self, run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
        """Apply `run`, a fused kernel for whole sequences, to queries, keys and values [B, T, N, H] sharded by heads.

        As in DeepSpeed-Ulysses (Jacobs et al. 2023). If the heads are not divisible, every device computes all of them.
        Further arguments, such as a mask [B, N, T, S], are replicated except for their rows.
        """
        args, others = args[:3], [self._constrain_axes(x, dict.fromkeys(range(1, x.ndim))) for x in args[3:]]
        heads_spec = self._heads_spec(args)
        sharded_by_heads = [
            self._constrain_axes(self._constrain_axes(x, {1: SEQUENCE}), {1: None, 2: heads_spec, 3: None})
            for x in args
        ]
        return [
            self._constrain_axes(self._constrain_axes(y, {1: None, 2: heads_spec, 3: None}), {1: SEQUENCE})
            for y in run(*sharded_by_heads, *others)
        ]

    def divides_heads(self, args: Sequence[Any]) -> bool:
        """Return whether `run_fused` divides the heads of queries, keys and values over all devices of `sequence`."""
        spec = self._heads_spec(args[:3])
        return SEQUENCE in (spec if isinstance(spec, tuple) else (spec,))

    def shares_heads(self, args: Sequence[Any]) -> bool:
        """Return whether `tensor` has more devices than it can give heads of queries, keys and values to."""
        return math.gcd(*(x.shape[2] for x in args[:3])) % self.mesh.shape.get(TENSOR, 1) != 0

    def _heads_spec(self, args: Sequence[Any]) -> Any:
        heads = math.gcd(*(x.shape[2] for x in args))
        return fit_spec(P(None, None, (TENSOR, SEQUENCE)), (0, 0, heads), self.mesh)[2]

    def moves_less_than(self, table: Any, indices: Any) -> bool:
        """Return whether every device looks up fewer rows than `table` has, by `indices` [B, …, 1]."""
        lookups = math.prod(indices.shape) // self._row_shards
        sharded = self.mesh.shape.get(FSDP, 1) > 1 and not self.lengths and self._has_rows(indices)
        return sharded and lookups < table.shape[0]

    def replicate_over_fsdp(self, x: Any, axes: Mapping[int, Any] = MappingProxyType({})) -> Any:
        """Shard the rows of `x` [B, …] over the other axes of the mesh only, and the given axes."""
        rows = tuple(axis for axis in self._rows if axis != FSDP)
        return self._constrain(x, {0: rows, **axes}, None)

    def _constrain_axes(self, x: Any, axes: Mapping[int, Any]) -> Any:
        """Shard the rows of `x` and the given axes; leave its other axes unconstrained."""
        if not self._has_rows(x):
            return x
        return self._constrain(x, {0: self._rows, **axes}, P.UNCONSTRAINED)

    @property
    def _rows(self) -> Any:
        (rows,) = P(tuple(axis for axis in self.row_axes if axis in self.mesh.shape))
        return rows

    @property
    def _row_shards(self) -> int:
        return math.prod(self.mesh.shape.get(axis, 1) for axis in self.row_axes)

    def _has_rows(self, x: Any) -> bool:
        divisible = self.count is not None and self.count % self._row_shards == 0
        return divisible and bool(jax.numpy.ndim(x)) and x.shape[0] == self.count

    def _token_axis(self, x: Any) -> dict[int, str]:
        # The last axis before the features, or before the keys of a mask: [B, T, C], [B, T, 1, H], [B, 1, T, S].
        axes = [i for i in range(1, x.ndim - 1) if x.shape[i] in self.lengths]
        return {axes[-1]: SEQUENCE} if axes else {}

    def _constrain(self, x: Any, axes: Mapping[int, Any], others: Any) -> Any:
        spec = P(*(axes.get(i, others) for i in range(x.ndim)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
