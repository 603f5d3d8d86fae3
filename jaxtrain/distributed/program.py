"""A loss computation as a program for a mesh: the same numbers, with what is where said in a few places.

The compiler divides the program by what its inputs are divided by (GSPMD, Xu et al. 2021). Left alone, it may as well
divide activations by what divides the weights. So it is told where rows, and tokens, stay divided: at the batch, and
wherever a marked block (`jaxtrain.block`) is entered and left; what is left to it in between is to gather weights, of
one layer of a scan at a time, and to sum gradients into the parts that a device keeps. Within blocks it is told of
sequences only that attention has its queries divided, so that it gathers keys and values, and that products do.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh

from jaxtrain.distributed.division import ShardingConstraints
from jaxtrain.distributed.mesh import DATA, FSDP, SEQUENCE, sequence_parallel_size
from jaxtrain.distributed.sharding import Rules, param_shardings, replicate_over
from jaxtrain.errors import UserError
from jaxtrain.transforms import BLOCK, UnmergeRows, jaxpr, precision


def constrain_shardings(compute: Callable[..., Any], mesh: Mesh, rules: Rules | None = None) -> Callable[..., Any]:
    """`compute(params, batch, …)`, as a loss_fn is, for parameters and rows divided over `mesh`.

    The gradient of a parameter is divided as the parameter is. Where the mesh divides sequences, so are the tokens of
    all that marked blocks make, [B, T, …], but for attention's keys and values. Raises `UserError` then for a program
    without sequences, or whose sequences do not divide.
    """

    def computed(params: Any, batch: Any, *rest: Any) -> Any:
        shardings = param_shardings(params, mesh, rules)
        params = jax.tree.map(lax.with_sharding_constraint, params, shardings)
        count = _rows(batch)
        batch = jax.tree.map(ShardingConstraints(mesh, count).of_batch, batch)
        weights = {id(x): s for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)}

        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            layers = {id(v) for v in _scanned(closed.jaxpr)}
            division = ShardingConstraints(
                mesh, count, _lengths(closed.jaxpr, count) if sequence_parallel_size(mesh.shape) > 1 else ()
            )
            apart = UnmergeRows()

            def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
                if jaxpr.is_call(eqn, BLOCK):
                    # Weights may happen to have as many rows.
                    own = [id(v) in layers or id(x) in weights for v, x in zip(eqn.invars, args, strict=True)]
                    args = [x if of_layer else division(x) for x, of_layer in zip(args, own, strict=True)]
                    return [division(y) for y in jaxpr.HIGHER_ORDER["jit"](eqn, args, run)]
                if eqn.primitive.name == "gather" and id(args[0]) in weights:
                    # Rows of a table that is divided along its width: of the whole table, or rows and width would meet.
                    table = lax.with_sharding_constraint(args[0], replicate_over(weights[id(args[0])], FSDP))
                    return [division.of_tokens(y) for y in jaxpr.bind(eqn, [table, *args[1:]])]
                if not division.lengths:
                    return None
                if eqn.primitive.name == "ragged_dot_general":
                    raise UserError(
                        f"the mesh axis {SEQUENCE} divides tokens, and experts take theirs from all rows together: "
                        f"put its devices on {DATA} or {FSDP}"
                    )
                if precision.low_precision_operation(eqn) and all(x.ndim == 4 for x in args):
                    return division.of_fused(lambda *x: jaxpr.HIGHER_ORDER["jit"](eqn, [*x], _as_it_is), args)
                if eqn.primitive.name == "reduce_max":
                    return jaxpr.bind(eqn, [division.of_scores(args[0], eqn.params["axes"])])
                return apart(eqn, args, run)

            return jaxpr.interpret(closed.jaxpr, closed.consts, leaves, rule)

        return jaxpr.retrace(compute, evaluate)(params, batch, *rest)

    return computed


def _as_it_is(traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return jaxpr.interpret(traced, consts, args, lambda eqn, args, run: None)


def _scanned(traced: Jaxpr) -> Iterator[Any]:
    """What the scans of a program hand to each of their steps: of a model's, the weights of a layer."""
    for eqn in traced.eqns:
        for inner in jaxpr.inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield from inner.invars[sum(jaxpr.scan_sizes(eqn)) :]
            yield from _scanned(inner)


def _lengths(traced: Jaxpr, count: int | None) -> set[int]:
    """Of the sequences that marked blocks make of a batch of `count` rows: the T of every [B, T, …]."""
    lengths = {v.aval.shape[1] for v in _made_by_blocks(traced) if v.aval.ndim == 3 and v.aval.shape[0] == count}
    if not lengths:
        raise UserError(
            f"the mesh axis {SEQUENCE} divides tokens, and no marked block of this model makes any, [rows, tokens, "
            f"width]: put its devices on {DATA} or {FSDP}"
        )
    return lengths


def _made_by_blocks(traced: Jaxpr) -> Iterator[Any]:
    for eqn in traced.eqns:
        if jaxpr.is_call(eqn, BLOCK):
            yield from eqn.outvars
        for inner in jaxpr.inner_jaxprs(eqn):
            yield from _made_by_blocks(inner)


def _rows(batch: Any) -> int | None:
    """How many there are in a batch; None where its arrays have different ones."""
    counts = {x.shape[0] for x in jax.tree.leaves(batch) if jax.numpy.ndim(x)}
    return counts.pop() if len(counts) == 1 else None
