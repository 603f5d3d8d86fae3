"""Evaluate a captured graph in JAX."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.passes import autocast_disabled, block, recomputed
from jaxtrain.torch_import.graph import (
    COND,
    CUSTOM,
    GETITEM,
    GRADIENT,
    RECOMPUTED,
    REPEAT,
    Graph,
    Node,
    Spec,
    dtype_of,
    resolved,
    without_unused,
)
from jaxtrain.torch_import.nested_gradients import gradient
from jaxtrain.torch_import.ops import RANDOM, TABLE
from jaxtrain.torch_import.ops.int64 import FLOAT64, INT64, as_int64, holds_int64, rounds
from jaxtrain.torch_import.refusals import first_line, refusal

Values = Mapping[str, Any]


def interpret(
    graph: Graph,
    *,
    params: Values,
    state: Values,
    constants: Values,
    inputs: Sequence[jax.Array],
    rng: jax.Array | None,
    ops: Mapping[str, Callable[..., Any]],
) -> tuple[Any, dict[str, jax.Array]]:
    """Evaluate a graph.

    Args:
      graph: The graph.
      params: Parameters by PyTorch's names.
      state: Buffers that the pass changes, by name.
      constants: Other buffers and tensors, by name.
      inputs: The leaves of the batch.
      rng: Key of the pass; None draws nothing.
      ops: Functions of operations beyond the table's.

    Returns:
      A tuple (outputs, new state).

    Raises:
      UserError: A function of an operation returned another shape than PyTorch.
    """
    with pytorchs_promotion():
        return _interpret(
            graph, {"param": params, "state": state, "constant": constants}, inputs, rng, {**TABLE, **ops}
        )


def _interpret(
    graph: Graph,
    given: Mapping[str, Values],
    inputs: Sequence[jax.Array],
    rng: jax.Array | None,
    table: Values,
    drawn: Any = 0,
) -> tuple[Any, dict[str, jax.Array]]:
    """Evaluate a graph, before which `drawn` operations drew random numbers."""
    values: dict[str, Any] = {}
    for x in graph.inputs:
        value = inputs[int(x.target)] if x.kind == "input" else given[x.kind][x.target]
        values[x.name] = _as(value, x.spec)
    places: dict[str, Any] = {}

    def evaluate(nodes: Iterable[Node], values: dict[str, Any]) -> None:
        nonlocal drawn
        for node in nodes:
            if node.op == GRADIENT:
                values[node.name] = gradient(node, graph.nodes, values, evaluate)
                continue
            # Within a gradient an operation draws the same numbers again.
            is_first = node.name not in places
            place = places.setdefault(node.name, drawn)
            values[node.name] = _evaluated(node, values, rng, table, place)
            if is_first and (count := _draws(node)):
                drawn += count

    evaluate(graph.nodes, values)
    return resolved(graph.outputs, values.__getitem__), {name: values[ref.name] for name, ref in graph.state.items()}


def _evaluated(node: Node, values: Values, rng: jax.Array | None, table: Values, drawn: Any) -> Any:
    """Evaluate a node, before which `drawn` operations drew random numbers."""
    args = resolved(node.args, values.__getitem__)
    if node.op == GETITEM:
        return args[0][args[1]]
    if node.op == CUSTOM:
        return _custom(node, args, table)
    if node.op == RECOMPUTED:
        return _recomputed(node, args, table)
    if node.op == REPEAT:
        return _repeated(node, args, rng, table, drawn)
    if node.op == COND:
        return _branched(node, args, rng, table, drawn)
    kwargs = resolved(node.kwargs, values.__getitem__)
    if node.promoted is not None:
        args, kwargs = jax.tree.map(lambda x, to=node.promoted: _promoted(x, to), (args, kwargs))
    if node.op in RANDOM:
        # Each operation has a stream of its own, the same one in a loop over layers as without it.
        kwargs["rng"] = None if rng is None else jax.random.fold_in(rng, drawn)
    disabled = autocast_disabled() if node.in_float32 else contextlib.nullcontext()
    with jax.named_scope(node.module.replace(".", "/") or node.name), disabled:
        return _checked(_called(table[node.op], node, args, kwargs), node)


@contextlib.contextmanager
def pytorchs_promotion() -> Iterator[None]:
    """Allow PyTorch's broadcasting and promotion, whatever the user asked JAX to reject."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _repeated(node: Node, args: Any, rng: jax.Array | None, table: Values, drawn: Any) -> tuple[jax.Array, ...]:
    """Evaluate layers by a loop; each is a block for rematerialization."""
    body, (init, stacks, closed) = node.kwargs["body"], jax.tree.map(as_int64, args)

    @block
    def layer(drawn: Any, rng: Any, carry: Any, slices: Any, closed: Any) -> Any:
        return _interpret(body, {}, [*carry, *slices, *closed], rng, table, drawn)[0]

    def step(carry: Any, inputs: Any) -> Any:
        i, slices = inputs
        return layer(drawn + i * draws if draws else 0, rng if draws else None, carry, slices, closed)

    length, draws = node.kwargs["length"], sum(map(_draws, body.nodes))
    carry, results = jax.lax.scan(step, init, (jnp.arange(length) if draws else None, stacks), length=length)
    return (*carry, *results)


def _branched(node: Node, args: Any, rng: jax.Array | None, table: Values, drawn: Any) -> tuple[jax.Array, ...]:
    """Evaluate the path of a condition, outside a trace alone."""
    condition, operands = jax.tree.map(as_int64, args)

    def path(name: str) -> Callable[..., tuple[jax.Array, ...]]:
        graph = node.kwargs[name]

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            outputs = _interpret(graph, {}, operands, rng, table, drawn)[0]
            return tuple(_as(x, spec) for x, spec in zip(outputs, node.spec, strict=True))  # type: ignore[arg-type]

        return run

    if not isinstance(condition, jax.core.Tracer):
        return path("holds" if bool(condition) else "otherwise")(*operands)
    found: tuple[jax.Array, ...] = jax.lax.cond(condition.astype(bool), path("holds"), path("otherwise"), *operands)
    return found


def first_draw(graph: Graph) -> Node | None:
    """Return the first operation of a graph that draws random numbers which its results depend on; None without one."""
    for node in without_unused(graph, ()).nodes:
        inner = [x for x in node.kwargs.values() if isinstance(x, Graph)]
        if found := next(filter(None, map(first_draw, inner)), None):
            return found
        if node.op in RANDOM and RANDOM[node.op](*node.args, **node.kwargs):
            return node
    return None


def _draws(node: Node) -> int:
    """Return how many operations that draw random numbers a node contains."""
    if node.op == REPEAT:
        return int(node.kwargs["length"] * sum(map(_draws, node.kwargs["body"].nodes)))
    if node.op == COND:
        return max(sum(map(_draws, node.kwargs[name].nodes)) for name in ("holds", "otherwise"))
    return int(node.op in RANDOM)


def _custom(node: Node, args: Sequence[jax.Array], table: Values) -> tuple[jax.Array, ...]:
    """Evaluate a call of `torch.autograd.Function`, whose gradient is that of its own backward pass."""
    count, has_gradient = node.kwargs["outputs"], node.kwargs["has_gradient"]

    def run(graph: Graph, inputs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        # The backward pass is traced after `interpret` has returned.
        with pytorchs_promotion():
            outputs: tuple[jax.Array, ...] = _interpret(graph, {}, inputs, None, table)[0]
        return outputs

    def forward(*inputs: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        outputs = run(node.kwargs["forward"], inputs)
        return outputs[:count], outputs[count:]

    def backward(saved: tuple[jax.Array, ...], grads: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
        floating = [x for x in grads if jnp.issubdtype(x.dtype, jnp.floating)]
        result = iter(run(node.kwargs["backward"], [*saved, *floating]))
        return tuple(next(result) if given else None for given in has_gradient)

    args = jax.tree.map(as_int64, args)
    called = jax.custom_vjp(lambda *inputs: forward(*inputs)[0])
    called.defvjp(forward, backward)
    outputs: tuple[jax.Array, ...] = called(*args)
    return outputs


def _recomputed(node: Node, args: Sequence[jax.Array], table: Values) -> jax.Array:
    """Evaluate a formula whose intermediate values the backward pass computes again."""

    def formula(*inputs: jax.Array) -> jax.Array:
        output: jax.Array = _interpret(node.kwargs["graph"], {}, inputs, None, table)[0]
        return output

    result: jax.Array = recomputed(formula)(*args)
    return result


def _as(value: Any, spec: Spec) -> jax.Array:
    if (spec.dtype == "int64" and holds_int64(value)) or (spec.dtype in FLOAT64 and rounds(value)):
        return value  # Only `INT64` reads it.
    return jnp.asarray(value, dtype_of(spec.dtype))


def _called(fn: Callable[..., Any], node: Node, args: Any, kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except (TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError) as error:
        remedy = f'pass ops={{"{node.op}": function}}'
        raise refusal(f"{node.op} with these arguments: {first_line(error)}", remedy, node.source) from error


def _promoted(value: Any, dtype: str) -> Any:
    return value.astype(dtype_of(dtype)) if isinstance(value, jax.Array) else value


def _checked(result: Any, node: Node) -> Any:
    """Return the result of a node in PyTorch's dtype, if it has PyTorch's shape."""
    if isinstance(node.spec, tuple):
        specs = (*node.spec, *[None] * (len(result) - len(node.spec)))
        return tuple(_one(x, spec, node) for x, spec in zip(result, specs, strict=True))
    return _one(result, node.spec, node)


def _one(x: Any, spec: Spec | None, node: Node) -> Any:
    if spec is None or x is None:
        return x
    if jnp.shape(x) != spec.shape:
        raise UserError(
            f"{node.op} returned the shape {list(jnp.shape(x))} where PyTorch has {list(spec.shape)} ({node.source}): "
            "correct its function"
        )
    if node.op == INT64 and x.dtype.name in ("int64", *FLOAT64):
        return x
    return jnp.asarray(x, dtype_of(spec.dtype))
