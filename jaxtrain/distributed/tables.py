"""Embedding tables on a mesh: the lookup of rows, and the product with the transposed table that many models end with.

Both contribute to the table's gradient. The compiler adds the contributions before it reduces them over the devices
only if both have the table's own layout. A product with the transposed table is therefore computed as a contraction
over the table's second axis. The product gathers a table that fsdp shards in its compute dtype; the lookup would gather
it again in float32, and does without if looking up rows moves fewer bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from jaxtrain.distributed.constraints import ShardingConstraints
from jaxtrain.distributed.mesh import FSDP
from jaxtrain.distributed.sharding import replicate_over
from jaxtrain.passes import DIVIDED_LOOKUP
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op


class Tables:
    """Rules for one evaluation of a program by `jaxtrain.program.rewrite`.

    Args:
      weights: The sharding of every parameter by the id of its value.
      constraints: The sharding constraints of the program's activations.
    """

    def __init__(self, weights: Mapping[int, NamedSharding], constraints: ShardingConstraints) -> None:
        self._weights, self._constraints = weights, constraints
        # By id: a transposed table and the table. Both are stored, so that no other value gets the id.
        self._transposed: dict[int, tuple[Any, Any]] = {}

    def __call__(self, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any] | None:
        """Return the outputs of a lookup or a transposition of a table; None for every other operation."""
        if not args or id(args[0]) not in self._weights:
            return None
        if op.of(eqn) == op.GATHER:
            return [self._constraints.constrain_tokens(self._lookup(eqn, args))]
        if op.of(eqn) == op.TRANSPOSE and equations.permutation(eqn) == (1, 0):
            (out,) = rewrite.bind(eqn, args)
            self._transposed[id(out)] = out, args[0]
            return [out]
        return None

    def product(self, eqn: JaxprEqn, args: list[Any]) -> tuple[JaxprEqn, list[Any]] | None:
        """Return a product with a transposed table as one with the table; None for every other operation."""
        if op.of(eqn) != op.DOT_GENERAL or id(args[1]) not in self._transposed:
            return None
        (of_rows, of_table), (batch, _) = equations.contraction(eqn)
        if batch or len(of_table) != 1:
            return None
        numbers = (of_rows, (1 - of_table[0],)), ((), ())
        eqn = equations.with_params(eqn, dimension_numbers=numbers)
        return eqn, [args[0], self._transposed[id(args[1])][1]]

    def _lookup(self, eqn: JaxprEqn, args: list[Any]) -> Any:
        table, indices = args
        sharding = self._weights[id(table)]
        if sharding.spec[1:] == (FSDP,) and self._constraints.moves_less_than(table, indices):

            def lookup(table: Any, indices: Any) -> Any:
                # Every device looks up its columns of the rows of all of fsdp; the devices exchange columns for rows.
                (columns,) = rewrite.bind(eqn, [table, self._constraints.replicate_over_fsdp(indices)])
                return self._constraints(self._constraints.replicate_over_fsdp(columns, {columns.ndim - 1: FSDP}))

            lookup.__name__ = DIVIDED_LOOKUP
            return jax.jit(lookup)(table, indices)
        # Gather rows from the replicated table: the mesh axis fsdp shards its width and the rows.
        (rows,) = rewrite.bind(eqn, [lax.with_sharding_constraint(table, replicate_over(sharding, (FSDP,))), indices])
        return rows
