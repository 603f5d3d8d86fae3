"""The operations of a graph as a tree of calls of modules."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.torch_import.graph import GETITEM, REPEAT, SELECT, Graph, ModuleCall, Node, Spec, references

Origins = Mapping[str, tuple[ModuleCall, ...]]


@dataclass
class Block:
    """A call of a module.

    Attributes:
      path: Path of the module; "" for the outermost, None for the function that calls it.
      level: Number of calls around it.
      items: Its operations and the calls it makes, in order.
      index: Place of its first operation in the graph.
    """

    path: str | None
    level: int
    items: list["Node | Block"] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        """Yield the operations of this call and of the calls it makes."""
        for item in self.items:
            if isinstance(item, Block):
                yield from item.nodes()
            else:
                yield item


def tree_of(graph: Graph, origins: Origins) -> Block:
    """Return a graph's operations by the calls of modules that they belong to. Results of operations follow these."""
    root = Block(None, 0)
    stack, keys = [root], [""]
    calls: tuple[ModuleCall, ...] = (ModuleCall("", None, ()),)
    for node in graph.nodes:
        if node.op == GETITEM:
            continue
        # An operation that a rewrite of the graph adds belongs to the call of the one before.
        calls = calls_of(node, origins) or tuple(x._replace(lines=()) for x in calls)
        depth = 1
        while depth < min(len(stack), len(calls)) and keys[depth] == calls[depth].key:
            depth += 1
        del stack[depth:], keys[depth:]
        for level in range(depth, len(calls)):
            block = Block(calls[level].path, level)
            stack[-1].items.append(block)
            stack.append(block)
            keys.append(calls[level].key)
        stack[-1].items.append(node)
    return root


def calls_of(node: Node, origins: Origins) -> tuple[ModuleCall, ...]:
    """Return the calls around an operation, outermost first; for a loop those around the container of its layers."""
    if node.op == SELECT and not node.source:  # of the stacked results of a loop
        return ()
    if node.op != REPEAT:
        return origins.get(node.name, ())
    first = next((origins[x.name] for x in node.kwargs["body"].nodes if x.name in origins), ())
    prefix = f"{node.module}." if node.module else ""
    inside = [call.path is not None and call.path != node.module and call.path.startswith(prefix) for call in first]
    return first[: inside.index(True)] if True in inside else first


def results_of(graph: Graph, live: Collection[str]) -> dict[str, dict[int, str]]:
    """Return the names of the results of each operation that are used, by their places; 0 for a single result."""
    found: dict[str, dict[int, str]] = {}
    for node in graph.nodes:
        if node.op == GETITEM:
            if node.name in live:
                found.setdefault(next(references(node.args)), {})[node.args[1]] = node.name
        elif not isinstance(node.spec, tuple):
            found.setdefault(node.name, {})[0] = node.name
    return found


def calls_in(graph: Graph, origins: Origins) -> set[frozenset[str]]:
    """Return the names of the operations of each call of a module in a graph and in the layers of its loops."""
    found = set()
    pending = [tree_of(graph, origins)]
    while pending:
        block = pending.pop()
        found.add(frozenset(node.name for node in block.nodes()))
        pending += [item for item in block.items if isinstance(item, Block)]
    bodies = [node.kwargs["body"] for node in graph.nodes if node.op == REPEAT]
    return found.union(*(calls_in(body, origins) for body in bodies))


def specs_of(graph: Graph) -> dict[str, Spec]:
    """Return shapes and dtypes of all values of a graph and of the layers of its loops."""
    found: dict[str, Any] = {x.name: x.spec for x in graph.inputs}
    for node in graph.nodes:
        for inner in node.kwargs.values():
            found |= specs_of(inner) if isinstance(inner, Graph) else {}
        if node.spec is not None:
            found[node.name] = node.spec
    return found
