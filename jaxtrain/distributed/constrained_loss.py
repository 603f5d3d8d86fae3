"""Add sharding constraints to a loss computation for a mesh, without changing its numbers.

The compiler propagates the shardings of the inputs through the program (GSPMD, Xu et al. 2021). Without constraints it
may shard activations like the weights. Rows, and tokens, are therefore constrained at the batch and at the entry and
exit of every marked block (`jaxtrain.block`). In between, the compiler gathers weights, one layer of a scan at a time,
and reduces gradients into the shard of each device. Within blocks, sequences are constrained only in products and in
attention. Long attention is divided by `jaxtrain.distributed.long_attention`. In other attention the queries stay
sharded so that keys and values are gathered, or the heads are sharded for cuDNN's kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding

from jaxtrain.distributed.constraints import ShardingConstraints
from jaxtrain.distributed.experts import divided_experts
from jaxtrain.distributed.long_attention import divided_attention, find_attention
from jaxtrain.distributed.mesh import DATA, DCN, FSDP, ROWS, SEQUENCE, sequence_parallel_size
from jaxtrain.distributed.sharding import Rules, divide_over, param_shardings
from jaxtrain.distributed.tables import Tables
from jaxtrain.errors import UserError
from jaxtrain.models.attention import is_long
from jaxtrain.models.routed_experts import find_routed_experts
from jaxtrain.passes import BLOCK, UnmergeRows
from jaxtrain.passes.numerics import autocast as precision
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op


def constrain_shardings(
    compute: Callable[..., Any],
    mesh: Mesh,
    rules: Rules | None = None,
    *,
    accumulate: Any = 1,
    row_axes: tuple[str, ...] = ROWS,
) -> Callable[..., Any]:
    """Constrain a function `compute(params, batch, …)`, such as a loss_fn, to a mesh.

    The gradient of a parameter is sharded like the parameter. If the mesh has a sequence axis, the tokens of all arrays
    [B, T, …] that marked blocks return are sharded, except the keys and values of attention.

    Args:
      compute: The function.
      mesh: The mesh.
      rules: `PartitionSpec`s of the parameters by path; None shards automatically.
      accumulate: Micro-batches per window. The gradients of one are added over data before dcn by constraints; those of
        several as sums of groups (`jaxtrain.distributed.row_groups`).
      row_axes: The mesh axes that shard rows.

    Returns:
      A function with the signature and the results of `compute`.

    Raises:
      UserError: At the call, if the mesh shards sequences and the program has none, or they are not divisible.
    """

    adds_by_node = accumulate == 1 and mesh.shape.get(DCN, 1) > 1 and mesh.shape.get(DATA, 1) > 1
    constrain_param = _with_gradient_added_by_node if adds_by_node else lax.with_sharding_constraint

    def constrained(params: Any, batch: Any, *rest: Any) -> Any:
        shardings = param_shardings(params, mesh, rules)
        params = jax.tree.map(constrain_param, params, shardings)
        count = _rows(batch)
        batch = jax.tree.map(ShardingConstraints(mesh, count, row_axes=row_axes).constrain_batch, batch)
        weights = {id(x): s for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)}

        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            layers = {id(v) for v in _scanned_variables(closed.jaxpr)}
            divides_tokens = sequence_parallel_size(mesh.shape) > 1
            constraints = ShardingConstraints(
                mesh, count, _lengths(closed.jaxpr, count) if divides_tokens else frozenset(), row_axes
            )
            tables, unmerge_rows = Tables(weights, constraints), UnmergeRows()
            on_gpu = _is_on_gpu(mesh)

            def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
                if equations.is_call(eqn, BLOCK):
                    # The first axis of weights may have the same size as the batch.
                    own = [id(v) in layers or id(x) in weights for v, x in zip(eqn.invars, args, strict=True)]
                    args = [x if of_layer else constraints(x) for x, of_layer in zip(args, own, strict=True)]
                    return [constraints(y) for y in rewrite.HIGHER_ORDER[op.JIT](eqn, args, run)]
                if (experts := find_routed_experts(eqn)) is not None and constraints.token_spec(args[0]) is not None:
                    return [divided_experts(experts, constraints, on_gpu)(*args)]
                if (outs := tables(eqn, args)) is not None:
                    return outs
                if (product := tables.product(eqn, args)) is not None:
                    outs = unmerge_rows(*product, run) if constraints.lengths else None
                    return rewrite.bind(*product) if outs is None else outs
                long = find_attention(eqn)
                if long is not None and constraints.lengths:
                    return [divided_attention(*long, constraints, on_gpu)(*args)]
                if on_gpu and (long is not None or _is_short_attention(eqn, args)):
                    # XLA would divide the heads by a part of an axis, which no `custom_partitioning` can express.
                    if constraints.lengths or constraints.shares_heads(args):
                        return constraints.run_fused(
                            lambda *x: rewrite.HIGHER_ORDER[op.JIT](eqn, [*x], _evaluate_unchanged), args
                        )
                    return None
                if not constraints.lengths:
                    return None
                if op.of(eqn) == op.REDUCE_MAX:
                    return rewrite.bind(eqn, [constraints.constrain_scores(args[0], equations.axes(eqn))])
                return unmerge_rows(eqn, args, run)

            return rewrite.interpret(closed.jaxpr, closed.consts, leaves, rule)

        return rewrite.retrace(compute, evaluate)(params, batch, *rest)

    return constrained


def _with_gradient_added_by_node(x: Any, sharding: NamedSharding) -> Any:
    """Constrain a parameter. Each device of data receives a part of its gradient, which dcn adds and data gathers."""

    @jax.custom_vjp
    def constrained(x: Any) -> Any:
        return lax.with_sharding_constraint(x, sharding)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        part = lax.with_sharding_constraint(gradient, divide_over(sharding, gradient.shape, DATA))
        return (lax.with_sharding_constraint(part, sharding),)

    constrained.defvjp(lambda x: (constrained(x), None), backward)
    return constrained(x)


def _is_on_gpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "gpu"


def _is_short_attention(eqn: JaxprEqn, args: Sequence[Any]) -> bool:
    if precision.low_precision_operation(eqn) is None or any(x.ndim != 4 for x in args):
        return False
    return not is_long(args[0].shape[1], args[1].shape[1])


def _evaluate_unchanged(traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return rewrite.interpret(traced, consts, args, lambda eqn, args, run: None)


def _scanned_variables(traced: Jaxpr) -> Iterator[Any]:
    """Yield the variables that scans pass to each iteration: in a model, the weights of one layer."""
    for eqn in equations.visit(traced):
        if op.of(eqn) == op.SCAN:
            yield from equations.scan_operands(eqn, equations.body(eqn).jaxpr.invars)[2]


def _lengths(traced: Jaxpr, count: int | None) -> frozenset[int]:
    """Return the sequence lengths T of all arrays [B, T, width] that marked blocks return."""
    lengths = {v.aval.shape[1] for v in _block_outputs(traced) if v.aval.ndim == 3 and v.aval.shape[0] == count}
    if not lengths:
        raise UserError(
            f"the mesh axis {SEQUENCE} shards tokens, and no marked block of this model returns any, [rows, tokens, "
            f"width]: put its devices on {DATA} or {FSDP}"
        )
    return frozenset(lengths)


def _block_outputs(traced: Jaxpr) -> Iterator[Any]:
    for eqn in equations.visit(traced):
        if equations.is_call(eqn, BLOCK):
            yield from eqn.outvars


def _rows(batch: Any) -> int | None:
    """Return the number of rows of a batch; None if its arrays differ."""
    counts = {x.shape[0] for x in jax.tree.leaves(batch) if jax.numpy.ndim(x)}
    return counts.pop() if len(counts) == 1 else None
