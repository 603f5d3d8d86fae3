"""What a graph assumes about a batch: values that `forward` read as Python numbers and conditions of the example.

Where an assumption does not hold, the graph is another one than PyTorch would compute. Every floating-point output is
then NaN, by a factor, so that its gradients are too; where values are known, outside `jax.jit`, it is an error.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxtrain.torch_import.graph import ASSUMED, COND, Assumption, Graph, Node, Ref, Spec
from jaxtrain.torch_import.ops.int64 import INT64
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.rewrites.layers import mapped


def assuming(graph: Graph, assumptions: Sequence[Assumption]) -> Graph:
    """Return a graph whose outputs are NaN where its assumptions do not hold.

    Raises:
      UserError: It has no floating-point output.
    """
    if not assumptions:
        return graph
    specs = specs_of(graph)
    for x in assumptions:
        if x.is_random:
            raise refusal(
                "a shape or a Python number depends on random numbers, or a condition whose paths have other shapes",
                "use torch.where and fixed shapes",
                x.source,
            )
    values, answers, sources = zip(*dict.fromkeys(x[:3] for x in assumptions), strict=True)
    name = next(name for i in itertools.count() if (name := f"assumed_{i}") not in specs)
    factor = Node(name, ASSUMED, values, {"answers": answers, "sources": sources}, Spec((), "float32"))
    found: dict[str, Node] = {}

    def output(ref: Ref) -> Ref:
        spec = specs[ref.name]
        if not isinstance(spec, Spec) or not jnp.issubdtype(jnp.dtype(spec.dtype), jnp.inexact):
            return ref
        name, args = f"{ref.name}_assumed", (ref, Ref(factor.name))
        found[name] = Node(name, "aten.mul.Tensor", args, {}, spec, spec.dtype)
        return Ref(name)

    outputs = mapped(graph.outputs, output)
    if not found:
        raise refusal(
            "a value is read as a Python number or condition, and no output is floating-point to be NaN where it is "
            "another one",
            "return a floating-point tensor as well",
            sources[0],
        )
    return replace(graph, nodes=(*graph.nodes, factor, *found.values()), outputs=outputs)


def specs_of(graph: Graph) -> dict[str, Any]:
    """Return the shapes and dtypes of a graph's values by name."""
    inputs: dict[str, Any] = {x.name: x.spec for x in graph.inputs}
    return inputs | {x.name: x.spec for x in graph.nodes}


def assumptions_of(graph: Graph) -> list[Assumption]:
    """Return the assumptions of a graph and of the graphs in it."""
    found = [x for node in graph.nodes if _is_assumed(node) for x in _of(node)]
    inner = [x for node in graph.nodes for x in node.kwargs.values() if isinstance(x, Graph)]
    return [*found, *(x for part in inner for x in assumptions_of(part))]


def _of(node: Node) -> Iterator[Assumption]:
    values = [x for x in node.args if isinstance(x, Ref)]
    return map(Assumption, values, node.kwargs["answers"], node.kwargs["sources"])


def _is_assumed(node: Node) -> bool:
    """Return whether a node computes assumptions, in 64 bits too."""
    return node.op == ASSUMED or (node.op == INT64 and node.args[0] == ASSUMED)


def checks_of(graph: Graph) -> Graph | None:
    """Return the part of a graph that computes what it assumes; None if it assumes nothing."""
    found = [Ref(node.name) for node in graph.nodes if _is_assumed(node) or (node.op == COND and _assumes(node))]
    return replace(graph, outputs=tuple(found), state={}) if found else None


def _assumes(node: Node) -> bool:
    return any(assumptions_of(x) for x in node.kwargs.values() if isinstance(x, Graph))
