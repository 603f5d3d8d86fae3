"""Evaluate a captured graph in JAX."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.torch_import.graph import CUSTOM, GETITEM, Dtype, Graph, Node, Ref, Spec, dtype_of
from jaxtrain.torch_import.ops import RANDOM, TABLE
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
    with _pytorchs_promotion():
        return _interpret(
            graph, {"param": params, "state": state, "constant": constants}, inputs, rng, {**TABLE, **ops}
        )


def _interpret(
    graph: Graph, given: Mapping[str, Values], inputs: Sequence[jax.Array], rng: jax.Array | None, table: Values
) -> tuple[Any, dict[str, jax.Array]]:
    values: dict[str, Any] = {}
    for x in graph.inputs:
        value = inputs[int(x.target)] if x.kind == "input" else given[x.kind][x.target]
        values[x.name] = _as(value, x.spec)
    drawn = 0
    for node in graph.nodes:
        args = _resolved(node.args, values)
        if node.op == GETITEM:
            values[node.name] = args[0][args[1]]
            continue
        if node.op == CUSTOM:
            values[node.name] = _custom(node, args, table)
            continue
        kwargs = _resolved(node.kwargs, values)
        if node.promoted is not None:
            args, kwargs = jax.tree.map(lambda x, to=node.promoted: _promoted(x, to), (args, kwargs))
        if node.op in RANDOM:
            # Each operation has a stream of its own, whichever others the pass contains.
            kwargs["rng"] = None if rng is None else jax.random.fold_in(rng, drawn)
            drawn += 1
        with jax.named_scope(node.module.replace(".", "/") or node.name):
            values[node.name] = _checked(_called(table[node.op], node, args, kwargs), node)
    return _resolved(graph.outputs, values), {name: values[ref.name] for name, ref in graph.state.items()}


@contextlib.contextmanager
def _pytorchs_promotion() -> Iterator[None]:
    """Allow PyTorch's broadcasting and promotion, whatever the user asked JAX to reject."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _custom(node: Node, args: Sequence[jax.Array], table: Values) -> tuple[jax.Array, ...]:
    """Evaluate a call of `torch.autograd.Function`, whose gradient is that of its own backward pass."""
    count, has_gradient = node.kwargs["outputs"], node.kwargs["has_gradient"]

    def run(graph: Graph, inputs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        # The backward pass is traced after `interpret` has returned.
        with _pytorchs_promotion():
            outputs: tuple[jax.Array, ...] = _interpret(graph, {}, inputs, None, table)[0]
        return outputs

    def forward(*inputs: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        outputs = run(node.kwargs["forward"], inputs)
        return outputs[:count], outputs[count:]

    def backward(saved: tuple[jax.Array, ...], grads: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
        floating = [x for x in grads if jnp.issubdtype(x.dtype, jnp.floating)]
        result = iter(run(node.kwargs["backward"], [*saved, *floating]))
        return tuple(next(result) if given else None for given in has_gradient)

    called = jax.custom_vjp(lambda *inputs: forward(*inputs)[0])
    called.defvjp(forward, backward)
    outputs: tuple[jax.Array, ...] = called(*args)
    return outputs


def _as(value: Any, spec: Spec) -> jax.Array:
    return jnp.asarray(value, dtype_of(spec.dtype))


def _resolved(value: Any, values: Values) -> Any:
    """Return an argument with the graph's values in place of their names."""
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, Dtype):
        return dtype_of(value.name)
    if isinstance(value, tuple):
        return tuple(_resolved(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _resolved(item, values) for key, item in value.items()}
    return value


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
    return jnp.asarray(x, dtype_of(spec.dtype))
