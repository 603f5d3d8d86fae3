"""Sharding rules of a captured module: `tensor` as in Megatron-LM, `fsdp` along the longest axis.

The first of two linear layers is sharded along its outputs, the second along its inputs (Shoeybi et al. 2019). A layer
is the second one if its input is computed from outputs of first ones: the output projection of attention, the last
product of an MLP.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxtrain.interop import OUT_IN, Layout
from jaxtrain.torch_import.graph import REPEAT, SELECT, Graph, Node, references

FSDP, TENSOR = "fsdp", "tensor"
EMBEDDING = "aten.embedding.default"
# Positions of the input, the weight and the bias among the arguments.
_LINEAR = {
    "aten.linear.default": (0, 1, 2),
    "aten.addmm.default": (1, 2, 0),
    "aten.mm.default": (0, 1, None),
    "aten.matmul.default": (0, 1, None),
}


def sharding_rules(
    graph: Graph, params: Mapping[str, Any], stacks: Collection[str], linear: Mapping[str, Layout]
) -> dict[str, P]:
    """Return the `PartitionSpec` of each parameter, by a regular expression for its name.

    Args:
      graph: A graph with loops over layers.
      params: The parameters.
      stacks: Names of the parameters that are stacked, whose first axis is not sharded.
      linear: Layouts of the weights of linear layers, by name.
    """
    known = {x.name: x.target for x in graph.inputs if x.kind == "param"}
    specs: dict[str, tuple[str | None, ...]] = {}
    for name, spec in _specs(graph, known, set(), linear):
        specs.setdefault(name, spec)
    return {re.escape(name): _spec(x.shape, name in stacks, specs.get(name)) for name, x in params.items()}


def _spec(shape: tuple[int, ...], is_stack: bool, found: tuple[str | None, ...] | None) -> P:
    layers, own = shape[: int(is_stack)], shape[int(is_stack) :]
    if found is None or len(found) != len(own):
        longest = max(range(len(own)), key=lambda i: (own[i], i), default=None)
        found = tuple(FSDP if i == longest else None for i in range(len(own)))
    return P(*(None for _ in layers), *found)


def _specs(
    graph: Graph, known: Mapping[str, str], sharded: set[str], linear: Mapping[str, Layout]
) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Yield (parameter, axes of the mesh) of linear layers and embeddings.

    Args:
      graph: A graph.
      known: Parameter by the name of its value.
      sharded: Names of the values whose features `tensor` shards; those of the graph are added.
      linear: As for `sharding_rules`.
    """
    known = dict(known)
    for node in graph.nodes:
        given = [*references((node.args, node.kwargs))]
        if node.op == SELECT and given[0] in known:
            known[node.name] = known[given[0]]
        elif node.op == EMBEDDING and given[0] in known:
            yield known[given[0]], (TENSOR, FSDP)
        elif node.op == REPEAT:
            body = node.kwargs["body"]
            outer = dict(zip((x.name for x in body.inputs), given, strict=True))
            inside = {name for name, x in outer.items() if x in sharded}
            yield from _specs(body, {name: known[x] for name, x in outer.items() if x in known}, inside, linear)
            if not inside.isdisjoint(references(body.outputs)):
                sharded.add(node.name)
        elif (layer := _layer(node, known, linear)) is not None:
            x, weight, bias = layer
            axes = (TENSOR, FSDP) if x in sharded else (FSDP, TENSOR)
            yield weight, axes[::-1] if linear[weight] is OUT_IN else axes
            if x not in sharded:
                sharded.add(node.name)
                if bias is not None:
                    yield bias, (TENSOR,)
        elif not sharded.isdisjoint(given):
            sharded.add(node.name)


def _layer(node: Node, known: Mapping[str, str], linear: Mapping[str, Layout]) -> tuple[str, str, str | None] | None:
    """Return (input, weight, bias) of a linear layer: the name of a value, and parameters."""
    if node.op not in _LINEAR:
        return None
    names = [next(references(arg), "") for arg in node.args]
    x, weight, bias = (names[i] if i is not None and i < len(names) else "" for i in _LINEAR[node.op])
    return (x, known[weight], known.get(bias)) if known.get(weight) in linear else None
