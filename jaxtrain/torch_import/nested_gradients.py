"""Gradients within a graph, as by `torch.autograd.grad` in `forward`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.torch_import.graph import Node, references

Evaluate = Callable[[Iterable[Node], dict[str, Any]], None]
"""Evaluates nodes, given the values that they read, to which it adds their results."""


def gradient(node: Node, nodes: Sequence[Node], values: dict[str, Any], evaluate: Evaluate) -> tuple[jax.Array, ...]:
    """Evaluate a `GRADIENT` node by the vector-Jacobian product of the operations from its inputs to its outputs.

    These are evaluated again, with the same random numbers; the compiler merges what is equal. So a derivative of this
    one is that of PyTorch's `create_graph=True`.

    Args:
      node: The node.
      nodes: Those of the graph.
      values: The values computed before it.
      evaluate: Evaluates nodes.
    """
    outputs, inputs, given = ([*references(part)] for part in node.args)

    def pulled_back(names: Sequence[str]) -> tuple[jax.Array, ...]:
        between = nodes_between(nodes, names, outputs)

        def run(*args: jax.Array) -> tuple[jax.Array, ...]:
            local = {**values, **dict(zip(names, args, strict=True))}
            evaluate(between, local)
            return tuple(local[name] for name in outputs)

        return gradients(run, [values[name] for name in names], [values[name] for name in given])

    if len({*inputs}) < len(inputs) or depends_on_another(nodes, inputs):
        # A gradient includes that through inputs which depend on its own.
        return tuple(pulled_back([name])[0] for name in inputs)
    return pulled_back(inputs)


def gradients(
    fn: Callable[..., Any], inputs: Sequence[jax.Array], grad_outputs: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Return the gradients of a function's outputs, as `torch.autograd.grad` with `create_graph=True`.

    Args:
      fn: From arrays to an array or a tuple of arrays.
      inputs: Its arguments.
      grad_outputs: An array of the shape of each output.
    """
    outputs, pullback = jax.vjp(fn, *inputs)
    leaves, structure = jax.tree.flatten(outputs)
    cotangents = (_conjugate(jnp.asarray(x, y.dtype)) for x, y in zip(grad_outputs, leaves, strict=True))
    return tuple(map(_conjugate, pullback(jax.tree.unflatten(structure, cotangents))))


def nodes_between(nodes: Sequence[Node], inputs: Sequence[str], outputs: Sequence[str]) -> list[Node]:
    """Return the nodes that depend on inputs and on which outputs depend, in their order; without those of inputs."""
    reached, after = {*inputs}, list[Node]()
    for node in nodes:
        if node.name not in inputs and not reached.isdisjoint(references((node.args, node.kwargs))):
            reached.add(node.name)
            after.append(node)
    needed, between = {*outputs}, list[Node]()
    for node in reversed(after):
        if node.name in needed:
            needed.update(references((node.args, node.kwargs)))
            between.append(node)
    return between[::-1]


def depends_on_another(nodes: Sequence[Node], inputs: Sequence[str]) -> bool:
    """Return whether one of some values depends on another one of them."""
    reached = {*inputs}
    for node in nodes:
        if not reached.isdisjoint(references((node.args, node.kwargs))):
            if node.name in inputs:
                return True
            reached.add(node.name)
    return False


def _conjugate(x: jax.Array) -> jax.Array:
    """Convert a gradient between JAX's and PyTorch's, which is the conjugate of a complex one."""
    return x.conj() if jnp.iscomplexobj(x) else x
