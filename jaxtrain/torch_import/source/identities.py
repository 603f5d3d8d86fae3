"""Operations that leave their operand as it is.

These are `x + 0` of integers and `x * 1`, settings of a module, and a second `detach`.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from jaxtrain.torch_import.graph import DETACH, LEAF, Graph, Node, Ref, Spec, references
from jaxtrain.torch_import.rewrites.layers import mapped

_NEUTRAL = {"aten.add.Tensor": 0, "aten.sub.Tensor": 0, "aten.mul.Tensor": 1, "aten.div.Tensor": 1}


def without_identities(graph: Graph) -> Graph:
    """Return a graph without operations that leave their operand as it is."""
    specs: dict[str, Any] = {x.name: x.spec for x in graph.inputs} | {node.name: node.spec for node in graph.nodes}
    uses = Counter(references(([(node.args, node.kwargs) for node in graph.nodes], graph.outputs, graph.state)))
    detached = {node.name for node in graph.nodes if node.op in (DETACH, LEAF) and uses[node.name] == 1}
    same: dict[str, Ref] = {}

    def known(ref: Ref) -> Ref:
        return same.get(ref.name, ref)

    nodes = []
    for node in graph.nodes:
        args, kwargs = mapped((node.args, node.kwargs), known)
        node = replace(node, args=args, kwargs=kwargs)
        if _is_identity(node, specs) or (node.op in (DETACH, LEAF) and args[0].name in detached):
            same[node.name] = args[0]
        else:
            nodes.append(node)
    outputs, state = mapped((graph.outputs, graph.state), known)
    return replace(graph, nodes=tuple(nodes), outputs=outputs, state=state)


def _is_identity(node: Node, specs: dict[str, Any]) -> bool:
    if node.op not in _NEUTRAL or node.kwargs or len(node.args) != 2:
        return False
    x, number = node.args
    if not isinstance(x, Ref) or isinstance(number, bool | Ref) or number != _NEUTRAL[node.op]:
        return False
    # A sum with 0 is not -0.
    is_exact = number == 1 or (isinstance(node.spec, Spec) and node.spec.dtype.startswith("int"))
    return is_exact and specs[x.name] == node.spec
