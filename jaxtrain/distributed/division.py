"""How the arrays of a program are divided over a mesh: which of their axes are rows, and which tokens."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import SEQUENCE, TENSOR, data_parallel_size, sequence_parallel_size
from jaxtrain.distributed.rows import window_sharding
from jaxtrain.distributed.sharding import fit_spec
from jaxtrain.errors import UserError


class ShardingConstraints:
    """How the arrays of a program are divided over `mesh`: those of `count` rows, and of sequences of these `lengths`.

    A `count` of None, or one that does not divide, leaves all of them as they are. Raises `UserError` for a length that
    does not divide.
    """

    def __init__(self, mesh: Mesh, count: int | None, lengths: Collection[int] = ()) -> None:
        self.lengths = lengths
        self._mesh = mesh
        self._count = count if count is not None and count % data_parallel_size(mesh.shape) == 0 else None
        (self._rows,) = window_sharding(mesh, 1).spec
        n = sequence_parallel_size(mesh.shape)
        for length in sorted(lengths):
            if length % n:
                raise UserError(
                    f"a sequence of {length} tokens is not divisible by the {n} devices of {SEQUENCE}: "
                    f"make it a multiple of {n}, or the mesh another"
                )

    def __call__(self, x: Any) -> Any:
        """`x` [B, …], with its rows divided, its tokens where it has them, and nothing else."""
        if not self._has_rows(x):
            return x
        return self._constrained(x, {0: self._rows, **self._tokens(x)}, None)

    def of_batch(self, x: Any) -> Any:
        """An array of a batch, [B, …] or [B, T, …]."""
        if not self._has_rows(x):
            return x
        n = sequence_parallel_size(self._mesh.shape)
        divides = n > 1 and x.ndim > 1 and x.shape[1] % n == 0
        return self._constrained(x, {0: self._rows, 1: SEQUENCE} if divides else {0: self._rows}, None)

    def of_tokens(self, x: Any) -> Any:
        """What was looked up for tokens, [B, T, …]."""
        return self(x) if self.lengths and self._has_rows(x) else x

    def of_scores(self, x: Any, over: tuple[int, ...]) -> Any:
        """Attention's scores [B, …, T, S], of which a softmax is taken over the keys: divided by queries.

        So it is keys and values that are gathered.
        """
        queries = [i for i in range(1, x.ndim) if x.shape[i] in self.lengths and i not in over]
        if x.ndim < 4 or not queries or {x.shape[i] for i in over} - {*self.lengths}:
            return x
        return self._placed(x, {queries[-1]: SEQUENCE, **dict.fromkeys(over)})

    def of_fused(self, run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
        """What `run`, a fused kernel that takes sequences whole, makes of queries, keys and values [B, T, N, H].

        It is divided by heads, as in DeepSpeed-Ulysses (Jacobs et al. 2023); where these do not divide, every device
        computes them all.
        """
        heads = math.gcd(*(x.shape[2] for x in args))
        of_heads = fit_spec(P(None, None, (TENSOR, SEQUENCE)), (0, 0, heads), self._mesh)[2]
        by_heads = [self._placed(self._placed(x, {1: SEQUENCE}), {1: None, 2: of_heads, 3: None}) for x in args]
        return [self._placed(self._placed(y, {1: None, 2: of_heads, 3: None}), {1: SEQUENCE}) for y in run(*by_heads)]

    def _placed(self, x: Any, places: Mapping[int, Any]) -> Any:
        """`x` with its rows divided, and those axes; of the others nothing is said."""
        if not self._has_rows(x):
            return x
        return self._constrained(x, {0: self._rows, **places}, P.UNCONSTRAINED)

    def _has_rows(self, x: Any) -> bool:
        return bool(jax.numpy.ndim(x)) and x.shape[0] == self._count

    def _tokens(self, x: Any) -> dict[int, str]:
        # Last but for the features, or the keys of a mask: [B, T, C], [B, T, 1, H], [B, 1, T, S].
        places = [i for i in range(1, x.ndim - 1) if x.shape[i] in self.lengths]
        return {places[-1]: SEQUENCE} if places else {}

    def _constrained(self, x: Any, places: Mapping[int, Any], others: Any) -> Any:
        spec = P(*(places.get(i, others) for i in range(x.ndim)))
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))
