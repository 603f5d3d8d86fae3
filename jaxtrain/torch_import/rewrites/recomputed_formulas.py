"""Elementwise formulas of a module that are cheaper to compute again than to keep.

A module that writes out an activation, such as the tanh approximation of GELU, gives a graph of ten operations, each of
which keeps an array for the backward pass. A library's activation keeps its input alone, and so do these formulas.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jaxtrain.torch_import.graph import RECOMPUTED, REPEAT, Graph, Input, Node, Ref, Spec, references

_LINEAR = frozenset({"add", "sub", "neg", "rsub", "float32"})
_SCALED = frozenset({"mul", "div"})


def with_recomputed_formulas(graph: Graph, chosen: Callable[[Sequence[Node]], bool] = lambda _: True) -> Graph:
    """Replace elementwise formulas by functions that the backward pass computes again, in low precision.

    Args:
      graph: The graph.
      chosen: Whether to replace the formula of these operations.

    Returns:
      The same graph with a `RECOMPUTED` node for each formula of several operations that depends on no more arrays than
      any part of it, and is not linear.
    """
    users = _users(graph)
    nodes = {node.name: node for node in graph.nodes}
    specs = {x.name: x.spec for x in graph.inputs} | {node.name: node.spec for node in graph.nodes}
    placed: dict[str, Node | None] = {}
    for node in reversed(graph.nodes):
        if node.name in placed or not _is_elementwise(node):
            continue
        formula = _formula(node, nodes, specs, users)
        if len(formula) > 1 and any(map(_is_nonlinear, formula)):
            is_chosen = chosen(formula)
            placed.update((part.name, None if is_chosen else part) for part in formula)
            if is_chosen:
                placed[node.name] = _recomputed(formula, specs)
    new = [placed.get(node.name, node) for node in graph.nodes]
    return replace(graph, nodes=tuple(_with_body(node, chosen) for node in new if node is not None))


def _with_body(node: Node, chosen: Callable[[Sequence[Node]], bool]) -> Node:
    """Return a loop over layers with the formulas of its body replaced; any other node as it is."""
    if node.op != REPEAT:
        return node
    return replace(node, kwargs={**node.kwargs, "body": with_recomputed_formulas(node.kwargs["body"], chosen)})


def _users(graph: Graph) -> Mapping[str, set[str]]:
    """Return the names of the nodes that use each value; "" stands for the graph's results."""
    users: dict[str, set[str]] = {}
    for name in references((graph.outputs, graph.state)):
        users.setdefault(name, set()).add("")
    for node in graph.nodes:
        for name in references((node.args, node.kwargs)):
            users.setdefault(name, set()).add(node.name)
    return users


def _is_elementwise(node: Node) -> bool:
    return node.promoted is not None and isinstance(node.spec, Spec) and not node.in_float32


def _is_nonlinear(node: Node) -> bool:
    name = node.op.split(".")[1]
    of_arrays = sum(isinstance(arg, Ref) for arg in node.args)
    return name not in _LINEAR and not (name in _SCALED and of_arrays < 2)


def _formula(
    last: Node, nodes: Mapping[str, Node], specs: Mapping[str, Any], users: Mapping[str, set[str]]
) -> list[Node]:
    """Return the elementwise nodes that end in one, as many as depend on no more arrays of its size."""
    formula = {last.name: last}
    arrays = len(_arrays(formula.values(), specs, last))
    grown = True
    while grown:
        grown = False
        for name in [*references([node.args for node in formula.values()])]:
            node = nodes.get(name)
            if node is None or name in formula or not _is_elementwise(node) or not users[name] <= formula.keys():
                continue
            more = {**formula, name: node}
            if (count := len(_arrays(more.values(), specs, last))) <= max(arrays, 1):
                formula, arrays, grown = more, count, True
    return [node for name, node in nodes.items() if name in formula]


def _arrays(formula: Iterable[Node], specs: Mapping[str, Any], last: Node) -> set[str]:
    """Return the values outside a formula that have as many elements as its result."""
    formula = list(formula)
    inside = {node.name for node in formula}
    size = _elements(last.spec)
    outside = {*references([(node.args, node.kwargs) for node in formula])} - inside
    return {name for name in outside if _elements(specs[name]) >= size}


def _elements(spec: Any) -> int:
    return prod(spec.shape) if isinstance(spec, Spec) else 0


def _recomputed(formula: Sequence[Node], specs: Mapping[str, Any]) -> Node:
    """Return a formula as one node."""
    last, inside = formula[-1], {node.name for node in formula}
    outside = [*dict.fromkeys(references([(x.args, x.kwargs) for x in formula]))]
    given = [name for name in outside if name not in inside]
    inputs = tuple(Input(name, "input", str(i), specs[name]) for i, name in enumerate(given))
    body = Graph(inputs, tuple(formula), Ref(last.name), {})
    return replace(last, op=RECOMPUTED, args=tuple(map(Ref, given)), kwargs={"graph": body}, promoted=None)
