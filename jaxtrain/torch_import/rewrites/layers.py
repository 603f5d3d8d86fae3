"""Find consecutive layers of a graph that differ in their parameters alone.

The layers are the numbered modules of a `ModuleList` or `Sequential`, by the module path of each node. Operations
between two layers belong to the first of them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtrain.torch_import.graph import Graph, Input, Node, Ref, Spec, has_gradient_inside

MAX_PERIOD = 8
"""Largest number of different layers that alternate; Gemma 3 has 5 with local attention for each with global."""


_OF_IMAGES = frozenset(
    f"aten.{name}"
    for rank in (2, 3)
    for name in (f"conv{rank}d.default", f"conv{rank}d.padding", f"conv_transpose{rank}d.input")
)


class Slot(NamedTuple):
    """An argument of a layer's node that comes from outside of the layer.

    Attributes:
      role: "closed" for the same value in all layers, "carry" for a result of the layer before, "scanned" for a
        parameter or buffer of the layer's own.
      result: Position of a carry's node in the layer before.
    """

    role: str
    result: int | None = None


@dataclass(frozen=True)
class Run:
    """Consecutive layers with the same operations.

    Attributes:
      container: Path of the module that numbers the layers.
      start: Position of the first node.
      length: Number of nodes of a layer, or of the several layers that alternate.
      count: Number of repetitions.
      slots: Role of each argument from outside, in the order of `mapped`.
    """

    container: str
    start: int
    length: int
    count: int
    slots: tuple[Slot, ...]

    @property
    def stop(self) -> int:
        """Position after the last node."""
        return self.start + self.length * self.count

    def layer(self, i: int) -> range:
        """Return the positions of the nodes of repetition i."""
        return range(self.start + i * self.length, self.start + (i + 1) * self.length)


def find_runs(graph: Graph, frozen: Collection[str]) -> list[Run]:
    """Return the runs of equal layers, in the order of the graph.

    Layers with convolutions of images are not among them: XLA:CPU computes those within a loop four times more slowly
    (ResNet-18), and on GPUs such a loop moves more bytes.
    A graph with `GRADIENT` has none: such a node differentiates the operations between two values of the graph.

    Args:
      graph: The graph.
      frozen: Names of parameters that are not trained: they do not repeat trained ones.
    """
    if has_gradient_inside(graph):
        return []
    finder, runs = _Finder(graph, frozen), list[Run]()
    for container in _containers(graph.nodes):
        found = finder.runs(container)
        runs += [run for run in found if not any(run.start < x.stop and x.start < run.stop for x in runs)]
    runs = [run for run in runs if not any(graph.nodes[i].op in _OF_IMAGES for i in run.layer(0))]
    return sorted(runs, key=lambda run: run.start)


def mapped(value: Any, fn: Callable[[Ref], Any]) -> Any:
    """Return an argument of a node with the result of `fn` in place of each of its references, in a fixed order."""
    if isinstance(value, Ref):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(mapped(item, fn) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, fn) for key, item in value.items()}
    return value


class _Visit(NamedTuple):
    """A call of a numbered module: its number, and the positions of its first and last node."""

    number: int
    first: int
    last: int
    calls_modules: bool


class _Layer(NamedTuple):
    """What must be the same in layers that repeat, and the names of the values from outside."""

    nodes: str
    outside: list[str]


class _Finder:
    def __init__(self, graph: Graph, frozen: Collection[str]) -> None:
        self._nodes, self._frozen = graph.nodes, frozen
        self._inputs = {x.name: x for x in graph.inputs}
        self._position = {node.name: i for i, node in enumerate(graph.nodes)}

    def runs(self, container: str) -> Iterator[Run]:
        """Yield the runs of a container; where several periods fit, that which covers the most layers."""
        visits, i = _visits(self._nodes, container), 0
        while i < len(visits):
            candidates = [(period, self._run(container, visits[i:], period)) for period in range(1, MAX_PERIOD + 1)]
            found = [(period, run) for period, run in candidates if run is not None]
            if not found:
                i += 1
                continue
            period, run = max(found, key=lambda x: (x[0] * x[1].count, -x[0]))
            yield run
            i += period * run.count

    def _run(self, container: str, visits: Sequence[_Visit], period: int) -> Run | None:
        """Return the run that starts with the first visits, `period` of them alternating."""
        groups = [visits[i : i + period] for i in range(0, len(visits) - period + 1, period)]
        if len(groups) < 2 or not any(visit.calls_modules for visit in groups[0]):
            return None
        start, length = groups[0][0].first, groups[1][0].first - groups[0][0].first
        count, layer, slots = 1, self._layer(start, length), None
        for group in groups[1:]:
            first = start + count * length
            if [x.number for x in group] != [x.number + count * period for x in groups[0]]:
                break
            if group[0].first != first or group[-1].last >= first + length or first + length > len(self._nodes):
                break
            following = self._layer(first, length)
            if following.nodes != layer.nodes:
                break
            pairs = zip(layer.outside, following.outside, strict=True)
            roles = [self._role(a, b, first - length, length) for a, b in pairs]
            if None in roles or roles != (slots or roles):
                break
            layer, slots, count = following, roles, count + 1
        return None if slots is None else Run(container, start, length, count, tuple(x for x in slots if x))

    def _layer(self, start: int, length: int) -> _Layer:
        """Return a layer with the positions of its own values, and the kinds of values from outside."""
        outside: list[str] = []

        def described(ref: Ref) -> Any:
            position = self._position.get(ref.name, -1)
            if position >= start:
                return Ref(str(position - start))
            outside.append(ref.name)
            return "outside", self._kind(ref.name)

        nodes = [
            (x.op, mapped((x.args, x.kwargs), described), x.spec, x.promoted, x.in_float32)
            for x in self._nodes[start : start + length]
        ]
        # As text, in which 1 is not True.
        return _Layer(repr(nodes), outside)

    def _kind(self, name: str) -> Any:
        given = self._inputs.get(name)
        if given is None or given.kind != "param":
            return given.spec if given else self._nodes[self._position[name]].spec
        return given.spec, given.target in self._frozen

    def _role(self, before: str, name: str, start: int, length: int) -> Slot | None:
        """Return the role of an argument, given its value in a layer and in the following one; None for no role."""
        position = self._position.get(name, -1)
        single = position < 0 or isinstance(self._nodes[position].spec, Spec)
        if not single:
            return None
        if name == before:
            return Slot("closed")
        if start <= position < start + length:
            return Slot("carry", position - start)
        own = all(_is_own(self._inputs.get(x)) for x in (before, name))
        return Slot("scanned") if own else None


def _is_own(given: Input | None) -> bool:
    return given is not None and given.kind != "input"


def _containers(nodes: Sequence[Node]) -> list[str]:
    """Return the paths of modules with numbered parts, outer ones first."""
    found = dict.fromkeys(
        tuple(parts[:i])
        for node in nodes
        for parts in [node.module.split(".")]
        for i, part in enumerate(parts)
        if part.isdigit()
    )
    return [".".join(parts) for parts in sorted(found, key=len)]


def _visits(nodes: Sequence[Node], container: str) -> list[_Visit]:
    """Return the calls of a container's numbered modules."""
    prefix = f"{container}." if container else ""
    visits: list[_Visit] = []
    for i, node in enumerate(nodes):
        number, dot, _ = node.module.removeprefix(prefix).partition(".")
        if not node.module.startswith(prefix) or not number.isdigit():
            continue
        if not visits or int(number) != visits[-1].number:
            visits.append(_Visit(int(number), i, i, False))
        visits[-1] = visits[-1]._replace(last=i, calls_modules=visits[-1].calls_modules or bool(dot))
    return visits
