"""Recognize keys and values that a module repeats for groups of queries, so that attention reads each of them once.

`transformers` repeats the key heads before it calls attention; `jaxtrain.models.attention` takes fewer key heads than
query heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxtrain.torch_import.graph import Graph, Node, Ref, Spec, without_unused
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.rewrites.masks import ATTENTION

_MERGES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


def with_grouped_queries(graph: Graph, ops: Mapping[str, Any]) -> Graph:
    """Replace repeated heads of keys and values, of attention of four axes, by the heads themselves.

    Args:
      graph: The graph.
      ops: Operations that the user defines, which are called with PyTorch's arguments.
    """
    if ATTENTION in ops:
        return graph
    made_by = {node.name: node for node in graph.nodes}
    shapes = {x.name: x.spec.shape for x in graph.inputs}
    shapes |= {node.name: node.spec.shape for node in graph.nodes if isinstance(node.spec, Spec)}
    nodes = []
    for node in graph.nodes:
        if node.op == ATTENTION:
            query, *heads = node.args[:3]
            single = [x for x in (_unrepeated(x, made_by, shapes) for x in heads) if x is not None]
            if len(single) == 2 and len({shapes[x.name][1] for x in single}) == 1:
                node = replace(node, args=(query, *single, *node.args[3:]))
        nodes.append(node)
    return without_unused(replace(graph, nodes=tuple(nodes)), RANDOM)


def _unrepeated(value: Ref, made_by: Mapping[str, Node], shapes: Mapping[str, tuple[int, ...]]) -> Ref | None:
    """Return [B, K, S, H] of an array [B, K · n, S, H] that repeats each head n times in a row; None of any other."""
    merged = made_by.get(value.name)
    if merged is None or merged.op not in _MERGES:
        return None
    repeated = made_by.get(merged.args[0].name)
    if repeated is not None and repeated.op == "aten.clone.default":
        repeated = made_by.get(repeated.args[0].name)
    if repeated is None or repeated.op != "aten.expand.default":
        return None
    single = made_by.get(repeated.args[0].name)
    if single is None or single.op != "aten.unsqueeze.default" or single.args[1] not in (2, -3):
        return None
    source: Ref = single.args[0]
    if [len(shapes[x]) for x in (source.name, repeated.name, merged.name)] != [4, 5, 4]:
        return None
    b, k, s, h = shapes[source.name]
    return source if shapes[merged.name] == (b, k * shapes[repeated.name][2], s, h) else None
