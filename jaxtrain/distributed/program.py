"""A loss computation as a program for a mesh: the same numbers, with what is where said in a few places.

The compiler divides the program by what its inputs are divided by (GSPMD, Xu et al. 2021). Left alone, it may as well
divide activations by what divides the weights. So it is told where rows stay divided: at the batch, and wherever a
marked block (`jaxtrain.block`) is entered and left; what is left to it in between is to gather weights, of one layer of
a scan at a time, and to sum gradients into the parts that a device keeps.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import jaxpr
from jaxtrain.distributed.mesh import FSDP, ways
from jaxtrain.distributed.rows import window_sharding
from jaxtrain.distributed.sharding import Rules, param_shardings, without
from jaxtrain.remat import BLOCK


def constrained(compute: Callable[..., Any], mesh: Mesh, rules: Rules | None = None) -> Callable[..., Any]:
    """`compute(params, batch, …)`, as a loss_fn is, for parameters and rows divided over `mesh`.

    The gradient of a parameter is divided as the parameter is.
    """
    (rows,) = window_sharding(mesh, 1).spec

    def divided(x: Any, count: int | None) -> Any:
        """`x` [B, …], with its rows divided, and nothing else."""
        if not jax.numpy.ndim(x) or x.shape[0] != count:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(rows, *[None] * (x.ndim - 1))))

    def computed(params: Any, batch: Any, *rest: Any) -> Any:
        shardings = param_shardings(params, mesh, rules)
        params = jax.tree.map(lax.with_sharding_constraint, params, shardings)
        count = _rows(batch, mesh)
        batch = jax.tree.map(lambda x: divided(x, count), batch)
        weights = {id(x): s for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)}

        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            layers = {id(v) for v in _scanned(closed.jaxpr)}

            def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
                if jaxpr.calls(eqn, BLOCK):
                    # Weights may happen to have as many rows.
                    own = [id(v) in layers or id(x) in weights for v, x in zip(eqn.invars, args, strict=True)]
                    args = [x if of_layer else divided(x, count) for x, of_layer in zip(args, own, strict=True)]
                    return [divided(y, count) for y in jaxpr.HIGHER_ORDER["jit"](eqn, args, run)]
                if eqn.primitive.name == "gather" and id(args[0]) in weights:
                    # Rows of a table that is divided along its width: of the whole table, or rows and width would meet.
                    table = lax.with_sharding_constraint(args[0], without(weights[id(args[0])], FSDP))
                    return jaxpr.bind(eqn, [table, *args[1:]])
                return None

            return jaxpr.interpret(closed.jaxpr, closed.consts, leaves, rule)

        return jaxpr.retraced(compute, evaluate)(params, batch, *rest)

    return computed


def _scanned(traced: Jaxpr) -> Iterator[Any]:
    """What the scans of a program hand to each of their steps: of a model's, the weights of a layer."""
    for eqn in traced.eqns:
        for inner in jaxpr.inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield from inner.invars[sum(jaxpr.scan_sizes(eqn)) :]
            yield from _scanned(inner)


def _rows(batch: Any, mesh: Mesh) -> int | None:
    """How many there are in a batch; None where they cannot be divided over the mesh."""
    counts = {x.shape[0] for x in jax.tree.leaves(batch) if jax.numpy.ndim(x)}
    count = min(counts, default=0)
    return count if len(counts) == 1 and count % ways(mesh.shape) == 0 else None
