"""Two paths of `forward`, which part at a condition, as one graph.

Both are captures of the same module, so that the operations before the condition are the same nodes by name. What
follows it is a graph for each answer.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxtrain.torch_import.assumptions import assuming, specs_of
from jaxtrain.torch_import.graph import (
    COND,
    GETITEM,
    Captured,
    Graph,
    Input,
    Node,
    Ref,
    has_gradient_inside,
    references,
)
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.rewrites.layers import mapped


def branched(condition: Ref, holds: Captured, otherwise: Captured) -> Captured | None:
    """Return the graph of both paths; None if their results or changed buffers have other structures, shapes or dtypes.

    Args:
      condition: The value that the paths depend on.
      holds: The path on which it is true, with its assumptions but for the condition.
      otherwise: The path on which it is false.
    """
    if has_gradient_inside(holds.graph) or has_gradient_inside(otherwise.graph):
        return None
    holds, otherwise = _with_same_state(holds, _with_own_names(otherwise, holds))
    common = _common(holds, otherwise)
    if condition.name not in common:
        return None
    before = tuple(x for x in holds.assumptions if x.value.name in common and x in otherwise.assumptions)
    paths = _assuming(holds, before), _assuming(otherwise, before)
    results = [(path.graph.outputs, path.graph.state) for path in paths]
    leaves = [[*references(result)] for result in results]
    specs = [[specs_of(path.graph)[name] for name in names] for path, names in zip(paths, leaves, strict=True)]
    structures = [mapped(result, lambda _: None) for result in results]
    if structures[0] != structures[1] or specs[0] != specs[1]:
        return None
    nodes = [[x for x in _needed(path.graph) if x.name not in common] for path in paths]
    reads = dict.fromkeys(name for part, names in zip(nodes, leaves, strict=True) for name in _read(part, names))
    known = specs_of(paths[0].graph) | specs_of(paths[1].graph)
    operands = tuple(reads)
    graphs = [_body(part, names, operands, known) for part, names in zip(nodes, leaves, strict=True)]
    shared = {x.name: x for path in paths for x in path.graph.nodes if x.name in common}
    name = _unused("branch", known)
    branch = Node(
        name,
        COND,
        (condition, tuple(map(Ref, operands))),
        {"holds": graphs[0], "otherwise": graphs[1]},
        tuple(specs[0]),
        source=next((x.source for x in holds.graph.nodes if x.name == condition.name), ""),
    )
    chosen = [
        Node(f"{name}_{i}", GETITEM, (Ref(name), i), {}, spec, module=branch.module, source=branch.source)
        for i, spec in enumerate(specs[0])
    ]
    places = iter(chosen)
    outputs, state = mapped(results[0], lambda _: Ref(next(places).name))
    inputs = [*{x.name: x for path in paths for x in path.graph.inputs}.values()]
    return Captured(
        Graph(tuple(inputs), (*_in_order(shared, paths), branch, *chosen), outputs, state),
        {**otherwise.constants, **holds.constants},
        {**otherwise.origins, **holds.origins},
        holds.unused & otherwise.unused,
        before,
    )


def _assuming(path: Captured, before: tuple[Any, ...]) -> Captured:
    """Return a path whose results are NaN where what it assumes itself does not hold."""
    own = [x for x in path.assumptions if x not in before]
    return path._replace(graph=assuming(path.graph, own), assumptions=before)


def _in_order(nodes: Mapping[str, Node], paths: tuple[Captured, Captured]) -> list[Node]:
    """Return nodes of both paths in an order of evaluation: each path leaves out what the other one alone needs."""
    placed, found = set[str](), list[Node]()

    def place(node: Node) -> None:
        if node.name not in placed:
            placed.add(node.name)
            for name in references((node.args, node.kwargs)):
                if name in nodes:
                    place(nodes[name])
            found.append(node)

    for path in paths:
        for node in path.graph.nodes:
            if node.name in nodes:
                place(nodes[node.name])
    return found


def _body(nodes: list[Node], results: list[str], operands: tuple[str, ...], specs: Mapping[str, Any]) -> Graph:
    """Return the graph of a path after the condition, whose inputs are values before it."""
    inputs = tuple(Input(name, "input", str(i), specs[name]) for i, name in enumerate(operands))
    return Graph(inputs, tuple(nodes), tuple(map(Ref, results)), {})


def _read(nodes: list[Node], results: list[str]) -> Iterator[str]:
    """Yield the values from outside of a path's nodes that they and its results read."""
    own = {x.name for x in nodes}
    for name in (*(name for x in nodes for name in references((x.args, x.kwargs))), *results):
        if name not in own:
            yield name


def _needed(graph: Graph) -> list[Node]:
    used = {*references((graph.outputs, graph.state))}
    for node in reversed(graph.nodes):
        if node.name in used or node.op in RANDOM:
            used.add(node.name)
            used.update(references((node.args, node.kwargs)))
    return [x for x in graph.nodes if x.name in used]


def _common(a: Captured, b: Captured) -> set[str]:
    """Return the names of the values that are the same in two paths."""
    inputs = {x.name: x for x in a.graph.inputs}
    common = {x.name for x in b.graph.inputs if inputs.get(x.name) == x}
    nodes = {x.name: x for x in a.graph.nodes}
    for node in b.graph.nodes:
        if nodes.get(node.name) == node and common.issuperset(references((node.args, node.kwargs))):
            common.add(node.name)
    # An operand of a path is one array: of an operation with several results, such as BatchNorm, an element of them.
    others = {x.name for x in b.graph.nodes}
    for node in (
        *(x for x in a.graph.nodes if x.name not in others),
        *(x for x in b.graph.nodes if x.name not in nodes),
    ):
        if node.op == GETITEM and node.args[0].name in common:
            common.add(node.name)
    return common


def _with_same_state(a: Captured, b: Captured) -> tuple[Captured, Captured]:
    """Return two paths that change the same buffers: where one does not, the buffer stays as it is."""
    changed = {x.target: x for path in (a, b) for x in path.graph.inputs if x.kind == "state"}

    def completed(path: Captured) -> Captured:
        given = {x.target: x.name for x in path.graph.inputs if x.kind in ("state", "constant")}
        inputs = [replace(x, kind="state") if x.target in changed else x for x in path.graph.inputs]
        inputs += [x for name, x in changed.items() if name not in given]
        kept = {name: Ref(given.get(name, x.name)) for name, x in changed.items()}
        state = {name: path.graph.state.get(name, kept[name]) for name in sorted(changed)}
        return path._replace(graph=replace(path.graph, inputs=tuple(inputs), state=state))

    return completed(a), completed(b)


def _with_own_names(path: Captured, other: Captured) -> Captured:
    """Return a path in which other values and constants than those of the other path have other names."""
    graph, constants = path.graph, path.constants
    theirs: dict[str, Input | Node] = {x.name: x for x in other.graph.inputs}
    theirs |= {x.name: x for x in other.graph.nodes}
    targets = {
        name: _unused(name, {**constants, **other.constants})
        for name, x in constants.items()
        if name in other.constants and not _is_same(x, other.constants[name])
    }
    names: dict[str, str] = {}
    taken = {*theirs, *specs_of(graph)}
    inputs = []
    for x in graph.inputs:
        target = targets.get(x.target, x.target) if x.kind == "constant" else x.target
        own = replace(x, target=target)
        same = theirs.get(x.name)
        if same is not None and not (isinstance(same, Input) and (same.target, same.spec) == (own.target, own.spec)):
            names[x.name] = _unused(x.name, taken)
        inputs.append(replace(own, name=names.get(x.name, x.name)))

    def renamed(value: Any) -> Any:
        return mapped(value, lambda ref: Ref(names.get(ref.name, ref.name)))

    nodes = []
    for node in graph.nodes:
        own_node = replace(node, args=renamed(node.args), kwargs=renamed(node.kwargs))
        same = theirs.get(node.name)
        if same is not None and same != own_node:
            names[node.name] = _unused(node.name, taken)
        nodes.append(replace(own_node, name=names.get(node.name, node.name)))
    return path._replace(
        graph=Graph(tuple(inputs), tuple(nodes), renamed(graph.outputs), renamed(graph.state)),
        constants={targets.get(name, name): x for name, x in constants.items()},
        origins={names.get(name, name): calls for name, calls in path.origins.items()},
        assumptions=tuple(x._replace(value=renamed(x.value)) for x in path.assumptions),
    )


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _unused(name: str, names: Collection[str]) -> str:
    i = 0
    while f"{name}_{i}" in names:
        i += 1
    return f"{name}_{i}"
