"""Evaluate layers that repeat by a loop over their stacked parameters.

The parameters of a run of layers become one, with a leading axis for the layer, as in the models of `jaxtrain.models`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxtrain.interop import LAYER, TorchParam
from jaxtrain.torch_import.graph import (
    GETITEM,
    REPEAT,
    SELECT,
    STACK,
    Graph,
    Input,
    Node,
    Ref,
    Spec,
    references,
    without_unused,
)
from jaxtrain.torch_import.rewrites.layers import Run, find_runs, mapped

Stacks = Mapping[str, TorchParam]
"""Stacked parameters and buffers by name: "transformer.h.*.ln_1.weight" for all layers, "layers.1:12.norm.weight" for
some of them, in Python's notation of slices."""
Equal = Callable[[Sequence[str]], bool]
"""Whether buffers, given by name, are the same."""


def find_stacks(graph: Graph, frozen: Collection[str]) -> Stacks:
    """Return the stacks of parameters and buffers that repeated layers need.

    Args:
      graph: The graph of training.
      frozen: Names of parameters that are not trained.
    """
    stacks: dict[str, TorchParam] = {}
    kinds = {x.name: x for x in graph.inputs}
    for run in find_runs(graph, frozen):
        own = {
            tuple(kinds[name].target for name in names)
            for slot, names in zip(run.slots, _columns(graph, run), strict=True)
            if slot.role == "scanned" and kinds[names[0]].kind != "constant"
        }
        taken = {name: names for stack in stacks.values() for names in [stack.names(0)] for name in names}
        named = [_stack(run.container, names) for names in own]
        # Layers that run twice have the same stacks twice.
        if all(named) and all(taken.get(name, list(names)) == list(names) for names in own for name in names):
            stacks |= {_stack_name(stack, graph): stack for stack in named if stack is not None}
    return stacks


def repeated(graph: Graph, stacks: Stacks, frozen: Collection[str], equal: Equal) -> Graph:
    """Return a graph that takes stacked parameters and evaluates layers that repeat as one `REPEAT` node.

    Args:
      graph: The graph.
      stacks: Result of `find_stacks` for the graph of training. Layers that do not repeat in this graph take their
        parameters from the stacks; parameters of layers that repeat otherwise are stacked from these.
      frozen: As for `find_stacks`.
      equal: Whether the buffers of these names are the same; such are not stacked.
    """
    if not stacks:
        return graph
    rewriting = _Rewriting(graph, stacks, equal)
    for run in find_runs(graph, frozen):
        rewriting.add(run)
    return rewriting.graph()


def _columns(graph: Graph, run: Run) -> list[tuple[str, ...]]:
    """Return the name of each argument from outside, in the order of the run's slots, in each layer."""
    return list(zip(*(_outside(graph, run.layer(i)) for i in range(run.count)), strict=True))


def _outside(graph: Graph, positions: range) -> list[str]:
    """Return the names of the values that a layer takes from outside, in the order of its slots."""
    nodes = [graph.nodes[i] for i in positions]
    inside = {node.name for node in nodes}
    return [name for node in nodes for name in references((node.args, node.kwargs)) if name not in inside]


def _stacked(spec: Any, count: int) -> Spec:
    return Spec((count, *spec.shape), spec.dtype)


def _stack(container: str, names: Sequence[str]) -> TorchParam | None:
    """Return the stack of tensors whose names differ in the number of the layer, in equal steps."""
    prefix = f"{container}." if container else ""
    parts = [name.removeprefix(prefix).partition(".") for name in names]
    numbers = [int(number) for number, _, _ in parts if number.isdigit()]
    rest = parts[0][2]
    if numbers != sorted(numbers) or list(names) != [f"{prefix}{i}.{rest}" for i in numbers]:
        return None
    layers = range(numbers[0], numbers[-1] + 1, max(1, numbers[1] - numbers[0]))
    return TorchParam(f"{prefix}{LAYER}.{rest}", layers=layers) if list(layers) == numbers else None


def _stack_name(stack: TorchParam, graph: Graph) -> str:
    """Return the name of a stack."""
    layers = stack.layers or range(0)
    everything = TorchParam(stack.name)
    count = sum(everything.has(x.target) for x in graph.inputs)
    if layers == range(count):
        return stack.name.replace(LAYER, "*")
    step = f":{layers.step}" if layers.step > 1 else ""
    return stack.name.replace(LAYER, f"{layers.start}:{layers.stop}{step}")


class _Arguments:
    """What a loop takes from outside.

    Attributes:
      carries: Initial value and position of the result that replaces it, of each value carried from layer to layer.
      scanned: Names of the stacked values, of which each layer takes its slice.
      closed: Names of the values that all layers take.
      names: Name within the layer of the argument in each slot.
    """

    def __init__(self) -> None:
        self.carries: list[tuple[str, int]] = []
        self.scanned: list[str] = []
        self.closed: list[str] = []
        self.names: list[str] = []

    def carry(self, initial: str, result: int) -> None:
        """Add an argument that is carried."""
        self.names.append(f"{initial}_carry{_place(self.carries, (initial, result))}")

    def scan(self, name: str) -> None:
        """Add an argument that is a slice."""
        _place(self.scanned, name)
        self.names.append(f"{name}_slice")

    def close(self, name: str) -> None:
        """Add an argument that all layers take."""
        _place(self.closed, name)
        self.names.append(name)

    def inputs(self, specs: Mapping[str, Any]) -> tuple[Input, ...]:
        """Return the inputs of a layer's graph."""
        carries = [(f"{initial}_carry{i}", specs[initial]) for i, (initial, _) in enumerate(self.carries)]
        scanned = [(f"{name}_slice", replace(specs[name], shape=specs[name].shape[1:])) for name in self.scanned]
        given = [*carries, *scanned, *((name, specs[name]) for name in self.closed)]
        return tuple(Input(name, "input", str(i), spec) for i, (name, spec) in enumerate(given))


def _place(items: list[Any], item: Any) -> int:
    """Return the place of an item in a list, to which it is added if it is new."""
    if item not in items:
        items.append(item)
    return items.index(item)


class _Rewriting:
    """A graph in which runs are replaced by loops, one after another."""

    def __init__(self, graph: Graph, stacks: Stacks, equal: Equal) -> None:
        self._given, self._equal = graph, equal
        self._inputs = {x.name: x for x in graph.inputs}
        self._specs: dict[str, Any] = {x.name: x.spec for x in graph.inputs}
        self._specs |= {node.name: node.spec for node in graph.nodes}
        self._stack_names = {tuple(param.names(0)): name for name, param in stacks.items()}
        self._place = {x: (names, i) for names in self._stack_names for i, x in enumerate(names)}
        self._stacked_inputs: dict[tuple[str, ...], Input] = {}
        self._stacked_results: dict[tuple[str, ...], str] = {}
        self._loops: dict[int, tuple[int, list[Node]]] = {}
        self._users: dict[str, list[int]] = {}
        results = (graph.outputs, graph.state)
        for i, value in enumerate((*((node.args, node.kwargs) for node in graph.nodes), results)):
            for name in references(value):
                self._users.setdefault(name, []).append(i)

    def add(self, run: Run) -> None:
        """Replace a run."""
        before: list[Node] = []
        arguments = self._arguments(run, before)
        carried = list(dict.fromkeys(result for _, result in arguments.carries))
        stacked = [j for j in range(run.length) if self._used_after(run, j, in_last=j not in carried)]
        body = self._body(run, arguments, stacked)
        layer = self._given.nodes[run.start : run.start + run.length]
        replaced: list[Any] = [layer[result].spec for _, result in arguments.carries]
        loop = Node(
            f"repeat_{run.start}",
            REPEAT,
            (
                tuple(Ref(initial) for initial, _ in arguments.carries),
                *(tuple(map(Ref, names)) for names in (arguments.scanned, arguments.closed)),
            ),
            {"body": body, "length": run.count},
            (*replaced, *(_stacked(layer[j].spec, run.count) for j in stacked)),
            module=run.container,
        )
        self._loops[run.start] = (run.stop, [*before, loop, *self._results(loop, run, arguments, stacked)])

    def graph(self) -> Graph:
        """Return the graph with the loops."""
        nodes, i = list[Node](), 0
        while i < len(self._given.nodes):
            i, loop = self._loops.get(i, (i + 1, [self._given.nodes[i]]))
            nodes += loop
        state, last = self._state()
        slices = [
            self._slice(x.name, self._stacked_input(names, x.kind), k, x.spec)
            for x in self._given.inputs
            if x.target in self._place and x.kind != "input"
            for names, k in [self._place[x.target]]
        ]
        kept = {x.name for x in self._given.inputs} - {node.name for node in slices}
        inputs = (*(x for x in self._given.inputs if x.name in kept), *self._stacked_inputs.values())
        graph = Graph(inputs, (*slices, *nodes, *last), self._given.outputs, state)
        return without_unused(graph, {node.op for node in self._given.nodes} - {GETITEM, SELECT})

    def _arguments(self, run: Run, before: list[Node]) -> _Arguments:
        """Return what the loop takes; `before` receives the nodes that stack what is no stack."""
        found = _Arguments()
        for slot, names in zip(run.slots, _columns(self._given, run), strict=True):
            targets = self._targets(names)
            if slot.result is not None:
                found.carry(names[0], slot.result)
            elif targets in self._stack_names:
                found.scan(self._stacked_input(targets, self._inputs[names[0]].kind))
            elif slot.role == "closed" or self._are_equal(names):
                found.close(names[0])
            else:
                found.scan(self._stack_of(names, before))
        return found

    def _are_equal(self, names: Sequence[str]) -> bool:
        return all(self._inputs[name].kind == "constant" for name in names) and self._equal(self._targets(names))

    def _targets(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._inputs[name].target for name in names if name in self._inputs)

    def _body(self, run: Run, arguments: _Arguments, stacked: Sequence[int]) -> Graph:
        """Return the graph of a layer."""
        first = [self._given.nodes[i] for i in run.layer(0)]
        inside, names = {node.name for node in first}, iter(arguments.names)

        def renamed(ref: Ref) -> Ref:
            return ref if ref.name in inside else Ref(next(names))

        nodes = []
        for node in first:
            args, kwargs = mapped((node.args, node.kwargs), renamed)
            nodes.append(replace(node, args=args, kwargs=kwargs))
        outputs = (tuple(result for _, result in arguments.carries), tuple(stacked))
        refs = tuple(tuple(Ref(first[j].name) for j in part) for part in outputs)
        return Graph(arguments.inputs(self._specs), tuple(nodes), refs, {})

    def _results(self, loop: Node, run: Run, arguments: _Arguments, stacked: Sequence[int]) -> list[Node]:
        """Return nodes with the names of the replaced ones, for what is used after the loop."""
        found: dict[str, Node] = {}
        for i, (_, result) in enumerate(arguments.carries):
            node = self._node(run, run.count - 1, result)
            found[node.name] = Node(node.name, GETITEM, (Ref(loop.name), i), {}, node.spec)
        for i, j in enumerate(stacked, len(arguments.carries)):
            nodes = [self._node(run, k, j) for k in range(run.count)]
            names, spec = tuple(node.name for node in nodes), _stacked(nodes[0].spec, run.count)
            whole = f"{names[0]}_stacked"
            found[whole] = Node(whole, GETITEM, (Ref(loop.name), i), {}, spec)
            self._stacked_results[names], self._specs[whole] = whole, spec
            for k, node in enumerate(nodes):
                found.setdefault(node.name, self._slice(node.name, whole, k, node.spec))
        return list(found.values())

    def _state(self) -> tuple[dict[str, Ref], list[Node]]:
        """Return the new state, with nodes that stack what no loop stacks."""
        state, last = dict(self._given.state), list[Node]()
        unchanged = {x.target: x.name for x in self._given.inputs}
        for names, stack in self._stack_names.items():
            if not any(name in state for name in names):
                continue
            refs = tuple(state.pop(name, Ref(unchanged.get(name, ""))).name for name in names)
            state[stack] = Ref(self._stacked_results.get(refs) or self._stack_of(refs, last))
        return state, last

    def _used_after(self, run: Run, position: int, in_last: bool) -> bool:
        """Return whether the result of a node is used outside of the run, in the last layer or in any other."""
        last = run.count - 1
        return any(
            not run.start <= user < run.stop
            for k in range(run.count)
            if in_last or k < last
            for user in self._users.get(self._node(run, k, position).name, ())
        )

    def _node(self, run: Run, layer: int, position: int) -> Node:
        return self._given.nodes[run.layer(layer)[position]]

    def _stacked_input(self, names: tuple[str, ...], kind: str) -> str:
        """Return the name of the input that is a stack."""
        if names not in self._stacked_inputs:
            first = next(x for x in self._given.inputs if x.target == names[0])
            spec = _stacked(first.spec, len(names))
            self._stacked_inputs[names] = Input(f"{first.name}_stacked", kind, self._stack_names[names], spec)
            self._specs[f"{first.name}_stacked"] = spec
        return self._stacked_inputs[names].name

    def _stack_of(self, names: Sequence[str], nodes: list[Node]) -> str:
        """Append a node that stacks values, and return its name."""
        name, spec = f"{names[0]}_stacked", _stacked(self._specs[names[0]], len(names))
        if name not in self._specs:
            nodes.append(Node(name, STACK, (tuple(map(Ref, names)), 0), {}, spec))
            self._specs[name] = spec
        return name

    def _slice(self, name: str, stack: str, i: int, spec: Any) -> Node:
        return Node(name, SELECT, (Ref(stack), 0, i), {}, spec)
