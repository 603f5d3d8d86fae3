"""Code that `forward` skips where a mask selects no rows, as by `if len(rows) > 0`.

It is captured as for some rows. That is right of no rows too if it then changes nothing: what it writes to no places
stays as it is, and a sum of nothing adds 0. So the graph with the code, where these selections are taken to be empty,
is compared with the graph without it.
"""

from collections.abc import Collection
from typing import Any

from jaxtrain.torch_import.graph import Graph, Node, Ref, Spec
from jaxtrain.torch_import.integer_ranges import names, packet_of
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.selected_rows import PLACE_OF_REDUCTION, PLACES, SUM

_WRITING = names("index_put _unsafe_index_put index_add index_copy index_fill scatter scatter_add masked_scatter")
_ADDING = names("add sub")
_NOTHING, _ZERO = -1, -2


def is_without_effect(graph: Graph, skipped: Collection[int], other: Graph, others: Collection[int]) -> bool:
    """Return whether two graphs compute the same where masks select no rows.

    Args:
      graph: A graph with the code that handles the rows.
      skipped: The prime numbers of these rows in it.
      other: The graph without the code.
      others: The same numbers in it.
    """
    table: dict[Any, int] = {}
    first, second = (_Values(x, numbers, table) for x, numbers in ((graph, skipped), (other, others)))
    return first.results() == second.results()


class _Values:
    """The values of a graph without some rows, as numbers that are the same for the same computation."""

    def __init__(self, graph: Graph, skipped: Collection[int], table: dict[Any, int]) -> None:
        self._graph, self._skipped, self._table = graph, {*skipped}, table
        self._of: dict[str, int] = {}
        self._masks: dict[int, int] = {}

    def results(self) -> Any:
        """Return the results of the graph and its new state."""
        self._evaluate()
        # The same mask may be computed again.
        masks = {self._masks.get(number) for number in self._skipped}
        self._skipped = {number for number, mask in self._masks.items() if mask in masks}
        self._evaluate()
        return self._key(self._graph.outputs), self._key(dict(self._graph.state))

    def _evaluate(self) -> None:
        self._draws = 0
        for x in self._graph.inputs:
            self._of[x.name] = self._number(("input", x.kind, x.target))
        for node in self._graph.nodes:
            if node.op == PLACES:
                mask, number = node.args
                self._masks.setdefault(number, self._of[mask.name])
            self._of[node.name] = self._value(node)

    def _number(self, key: Any) -> int:
        return self._table.setdefault(key, len(self._table))

    def _key(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(str(self._of[value.name]))
        if isinstance(value, tuple | list):
            return tuple(map(self._key, value))
        if isinstance(value, dict):
            return tuple(sorted((str(name), self._key(x)) for name, x in value.items()))
        if isinstance(value, Graph):
            return id(value)
        if type(value) is int:
            for number, mask in self._masks.items():
                if value and value % number == 0:
                    return ("rows", mask, value // number)
        return (type(value).__name__, value)

    def _value(self, node: Node) -> int:
        shape = node.spec.shape if isinstance(node.spec, Spec) else ()
        if any(n and n % number == 0 for n in shape for number in self._skipped):
            return _NOTHING
        given = [self._of[x.name] for x in node.args if isinstance(x, Ref)]
        given += [self._of[x.name] for arg in node.args if isinstance(arg, tuple) for x in arg if isinstance(x, Ref)]
        packet = packet_of(node)
        if packet in _WRITING and _NOTHING in given[1:]:
            return given[0]
        if _NOTHING in given and _is_sum(node):
            return _ZERO
        if packet in _ADDING and _ZERO in given[1:] and given[0] != _ZERO:
            return given[0]
        # What is computed of nothing depends on nothing else.
        key: Any = (node.op, self._key(node.args), self._key(node.kwargs), node.promoted, self._key(shape))
        if node.op in RANDOM:
            self._draws += 1
            key = (*key, self._draws)
        return self._number(key)


def _is_sum(node: Node) -> bool:
    """Return whether an operation adds the rows of its first argument up."""
    packet = packet_of(node)
    place = PLACE_OF_REDUCTION.get(packet)
    return packet == "sum" or (
        place is not None and SUM in (node.kwargs.get("reduction"), *node.args[place : place + 1])
    )
