"""Layers that repeat, written as `jax.lax.scan` over their stacked parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtrain.torch_import.graph import Graph, Input, Node, Ref, references
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.source.body import Body, Item, Resolve
from jaxtrain.torch_import.source.call_tree import Block, tree_of
from jaxtrain.torch_import.source.class_functions import Module
from jaxtrain.torch_import.source.expressions import Expr, call
from jaxtrain.torch_import.source.identifiers import input_names
from jaxtrain.torch_import.source.scope import Scope

_FUNCTION, _KEYS = "layer", "layer_keys"
RESERVED = frozenset({_FUNCTION, _KEYS, "layer_params", "layer_buffers", "inputs", "carry", "i", "new_state"})


@dataclass
class _Slices:
    """What a layer takes of the stacked arrays.

    Attributes:
      inputs: Its inputs in the layer's graph, with the names of the first layer's tensors.
      trees: By path of the first layer and kind, the path of the stacks.
      arrays: Stacked values that are neither parameters nor buffers, with their names in the layer's graph.
    """

    inputs: list[Input] = field(default_factory=list)
    trees: dict[tuple[str, str], str] = field(default_factory=dict)
    arrays: dict[str, str] = field(default_factory=dict)

    def name(self, kind: str, path: str) -> str:
        """Return the name of the dict with the tensors of a layer."""
        is_only = len({path for path, _ in self.trees}) == 1
        return f"layer_{kind}" if is_only else f"layer_{kind}_{path.rpartition('.')[2]}"

    def names(self) -> list[str]:
        """Return the names of the dicts."""
        return [self.name(kind, path) for path, kind in self.trees]

    def scope(self) -> Scope:
        """Return the tensors that the layer's code can read."""
        paths = dict.fromkeys(path for path, _ in self.trees)
        return Scope({path: {kind: self.name(kind, path) for kind in ("params", "buffers")} for path in paths})


def loop_item(module: Module, node: Node, owner: Block, scope: Scope) -> Item:
    """Return the statements of a loop as an item.

    Args:
      module: Writes the functions of the graph.
      node: The `REPEAT` node.
      owner: The call of a module whose function contains it.
      scope: What this function can read.
    """
    return _Loop(module, node, owner, scope).item()


class _Loop:
    def __init__(self, module: Module, node: Node, owner: Block, scope: Scope) -> None:
        self._module, self._node, self._owner, self._scope = module, node, owner, scope
        self._body: Graph = node.kwargs["body"]
        self._init, scanned, closed = ([ref.name for ref in part] for part in node.args)
        count, middle = len(self._init), len(self._init) + len(scanned)
        self._carried = [x.name for x in self._body.inputs[:count]]
        self._closed = closed
        self._slices = self._sliced(scanned, self._body.inputs[count:middle])
        self._results = module.results.get(node.name, {})
        self._stacked = [
            place for place in sorted(self._results) if place >= count and not module.is_state(self._results[place])
        ]
        state = self._state()
        hints = {x: module.hint(initial) for x, initial in zip(self._carried, self._init, strict=True)}
        hints |= {name: module.hint(name) for name in closed}
        hints |= {name: module.hint(value) for value, name in self._slices.arrays.items()}
        constants = (module.given[name] for name in closed if module.is_written_out(name))
        known = {x.name: x for x in (*self._slices.inputs, *constants)}
        inputs = tuple(known.get(x.name, replace(x, kind="input")) for x in self._body.inputs)
        self._inner = module.nested(replace(self._body, inputs=inputs, state=state), hints)
        self._items = self._layer_items()
        self._draws = sum(map(module.writing.draws, self._body.nodes))
        self._has_state = bool(state)

    def item(self) -> Item:
        """Return the loop."""
        count = len(self._init)
        places = [*range(count), *self._stacked]
        results = {i: self._results[place] for i, place in enumerate(places) if place in self._results}
        arrays = [*self._slices.arrays]
        return Item(
            self._call,
            [*self._init, *self._closed, *arrays],
            results,
            len(places) + (not self._stacked and not self._has_state),
            self._module.statements(self._node, self._owner),
            "hidden",
            new_state=self._state_path() if self._has_state else None,
            named=frozenset(self._closed),
            before=self._definition,
            after=f"keys.drawn += {self._draws * self._node.kwargs['length']}" if self._draws else "",
            packed=lambda targets: f"{_packed(targets[:count])}, {_packed(targets[count:])}",
        )

    def _sliced(self, scanned: Sequence[str], inputs: Sequence[Input]) -> _Slices:
        found, prefix = _Slices(), f"{self._node.module}." if self._node.module else ""
        for name, own in zip(scanned, inputs, strict=True):
            given = self._module.given.get(name)
            if given is None:
                found.arrays[name] = own.name
                continue
            label, _, rest = given.target.removeprefix(prefix).partition(".")
            path = prefix + ("0" if label == "*" else label.partition(":")[0])
            # A buffer is constant in evaluation mode, but not the same in all layers.
            kind, tree = ("param", "params") if given.kind == "param" else ("state", "buffers")
            found.inputs.append(Input(own.name, kind, f"{path}.{rest}", own.spec))
            found.trees[path, tree] = prefix + label
        found.trees = dict(sorted(found.trees.items(), key=lambda tree: (tree[0][1] == "buffers", tree[0])))
        return found

    def _state(self) -> dict[str, Ref]:
        """Return the new values of a layer's buffers, by the names of the first layer's."""
        targets = {x.target: x for x in self._slices.inputs}
        stacks = {stack: path for (path, _), stack in self._slices.trees.items()}
        found = {}
        for place, value in self._results.items():
            for name in self._module.updates.get(value, []):
                stack = next(stack for stack in stacks if name.startswith(f"{stack}."))
                target = stacks[stack] + name.removeprefix(stack)
                if target in targets:
                    found[target] = self._body.outputs[1][place - len(self._init)]
        if found and len(stacks) > 1:
            raise refusal(
                f"a loop over layers of {self._node.module!r} that alternate and change buffers cannot be written",
                "import it with unroll=True",
            )
        return found

    def _state_path(self) -> str:
        stack = next(iter(self._slices.trees.values()))
        found = self._scope.find(stack)
        return stack if found is None else found[1]

    def _layer_items(self) -> list[Item]:
        block = tree_of(self._inner.graph, self._module.origins)
        while block.level < self._owner.level:
            block = next(item for item in block.items if isinstance(item, Block))
        return self._inner.items(block, block, self._slices.scope())

    def _call(self, resolve: Resolve) -> Expr:
        """Return the call of `scan`."""
        trees = [
            self._scope.tree(kind, stack) or _elsewhere(self._node) for (_, kind), stack in self._slices.trees.items()
        ]
        steps = [call("jnp.arange", self._node.kwargs["length"])] if self._draws else []
        parts = [*steps, *trees, *map(resolve, self._slices.arrays)]
        inputs = Expr(_packed([x.text for x in parts])) if parts else Expr("None")
        length = None if parts else self._node.kwargs["length"]
        initial = Expr(_packed([resolve(name).text for name in self._init]))
        return call("jax.lax.scan", Expr(_FUNCTION), initial, inputs, length=length)

    def _definition(self, resolve: Resolve) -> list[str]:
        """Return the definition of the function of a layer."""
        closed = {name: resolve(name) for name in self._closed}
        kept = {x.text for x in closed.values() if x.text.isidentifier()}
        names = self._argument_names(kept)
        inner = self._inner.outer(self._slices.scope())

        def outer(value: str) -> Expr:
            return closed[value] if value in closed else inner(value)

        reserved = self._module.reserved() | RESERVED
        bound = {name: value for value, name in names.items()}
        body = Body(bound, outer, reserved, [], indent=2, kept=kept, keys=_KEYS)
        carries, stacks = self._body.outputs
        stacks = [stacks[place - len(self._init)] for place in self._stacked]

        def result(resolve: Resolve) -> Expr:
            new = _packed([resolve(ref.name).text for ref in carries])
            others = [resolve(ref.name).text for ref in stacks] + ["new_state"] * self._has_state
            return Expr(f"{new}, {_packed(others) if others else 'None'}")

        body.write(self._items, list(references((carries, tuple(stacks)))), result)
        return ["", *self._head(names), *self._start(names), *body.lines, ""]

    def _argument_names(self, taken: set[str]) -> Mapping[str, str]:
        """Return the names of what the layer takes besides its tensors: those of what replaces them."""
        made = {value: (item, place) for item in self._items for place, value in item.results.items()}
        replaced = dict(zip(self._carried, (ref.name for ref in self._body.outputs[0]), strict=True))

        def hint(value: str) -> str:
            item, place = made.get(replaced.get(value, ""), (None, 0))
            found = [] if item is None else item.names_for(place, lambda _: True)
            return found[0] if found else self._inner.hint(value)

        read = {value for item in self._items for value in item.operands}
        values = [value for value in (*self._carried, *self._slices.arrays.values()) if value in read]
        reserved = self._module.reserved() | RESERVED | taken
        names = input_names(values, self._items, (), hint, reserved)
        return {**{value: "_" for value in self._carried if value not in read}, **names}

    def _head(self, names: Mapping[str, str]) -> list[str]:
        carries = [names[value] for value in self._carried]
        carry, inputs = _one(carries, "carry"), self._inputs(names)[0]
        arguments = f"{carry}: {'Array' if len(carries) == 1 else 'Any'}, {inputs}: Any"
        return ["    @jt.block", f"    def {_FUNCTION}({arguments}) -> tuple[Any, Any]:"]

    def _inputs(self, names: Mapping[str, str]) -> tuple[str, list[str]]:
        """Return the name of a layer's second argument, and those of its parts."""
        parts = ["i"] * bool(self._draws) + self._slices.names()
        parts += [names.get(value, "_") for value in self._slices.arrays.values()]
        return _one(parts, "inputs"), parts

    def _start(self, names: Mapping[str, str]) -> list[str]:
        """Return the statements that unpack the arguments."""
        carries, (_, parts) = [names[value] for value in self._carried], self._inputs(names)
        lines = [f"{', '.join(carries)} = carry"] * (len(carries) > 1)
        lines += [f"{', '.join(parts)} = inputs"] * (len(parts) > 1)
        lines += [f"{_KEYS} = keys.layer(i, {self._draws})"] * bool(self._draws)
        own = any(item.new_state for item in self._items)
        return [f"        {line}" for line in [*lines, *["new_state = {}"] * own]]


def _one(names: Sequence[str], several: str) -> str:
    return names[0] if len(names) == 1 else several if names else "_"


def _packed(names: Sequence[str]) -> str:
    """Return one name, or a tuple; "_" for none."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else "_"


def _elsewhere(node: Node) -> Any:
    raise refusal(f"the loop over {node.module!r} reads layers of another module", "import it with unroll=True")
