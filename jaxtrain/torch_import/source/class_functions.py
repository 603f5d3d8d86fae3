"""One function for each class of modules: what it takes, what it returns, and its text."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxtrain.torch_import.graph import DETACH, GETITEM, LEAF, Graph, Input, Node, Ref, Spec, dtype_of, references
from jaxtrain.torch_import.source.batch_norm_call import batch_norm_item
from jaxtrain.torch_import.source.body import Body, Item, Resolve
from jaxtrain.torch_import.source.call_tree import Block, Origins, calls_of, results_of, specs_of, tree_of
from jaxtrain.torch_import.source.expressions import Expr, attribute, call, method, structure, subscript
from jaxtrain.torch_import.source.identifiers import RESERVED, identifier, input_names, mentions, place_of, snake_case
from jaxtrain.torch_import.source.pytorch_code import file_of, forward_of, statements
from jaxtrain.torch_import.source.scope import Scope, own
from jaxtrain.torch_import.source.signatures import Function, Functions, docstring, result_type, shape_of, typed
from jaxtrain.torch_import.source.writing import Writing

_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_PASSING = frozenset({"detach", "leaf", "mul", "add", "_to_copy", "view", "clone"})
"""Operations whose result has the name of their only operand, if PyTorch's code gives it none."""
_FLAGS = ("params", "buffers", "keys", "train")


class Module:
    """Writes the functions of a graph.

    Attributes:
      graph: The graph.
      origins: Where its operations come from.
      writing: Writes the expressions.
      functions: Receives the functions.
      given: Its inputs by name.
      results: Used results of its operations, by place.
      updates: Buffers that a value becomes.
    """

    def __init__(
        self,
        graph: Graph,
        origins: Origins,
        classes: Mapping[str, type],
        constants: Callable[[Input], Expr | None],
        inputs: Sequence[str],
        writing: Writing,
        functions: Functions,
        recomputed: Collection[frozenset[str]],
        special: "Special",
        hints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Read a graph.

        Args:
          graph: The graph, without unused operations.
          origins: Where its operations come from.
          classes: Classes of the modules by path.
          constants: The expression of a constant.
          inputs: Expressions of the inputs in the function `model`.
          writing: Writes the expressions.
          functions: Receives the functions.
          recomputed: Operations of the functions that the backward pass computes again.
          special: Writes the operations that contain graphs.
          hints: PyTorch's names of values from outside of the graph.
        """
        self.graph, self._classes, self._constants, self._hints = graph, classes, constants, hints
        self.origins, self._batch, self.writing, self.functions = origins, inputs, writing, functions
        self.given = {x.name: x for x in graph.inputs}
        self._recomputed, self._special = recomputed, special
        self._specs = specs_of(graph)
        live = {*references((graph.outputs, graph.state))}
        for node in reversed(graph.nodes):
            live.update(references((node.args, node.kwargs)))
        self.results = results_of(graph, live)
        for node in graph.nodes:
            if node.op != GETITEM and node.op not in special and (places := sorted(self.results.get(node.name, {}))):
                writing.prepare(node, places)
        self._names = frozenset(snake_case(cls.__name__) for cls in classes.values())
        self._uses: Counter[str] = Counter(references((graph.outputs, tuple(graph.state.values()))))
        for node in graph.nodes:
            if node.op != GETITEM:
                self._uses.update(references((node.args, node.kwargs)))
        self.updates: dict[str, list[str]] = {}  # value -> buffers that become it
        for name, ref in graph.state.items():
            self.updates.setdefault(ref.name, []).append(name)

    def write(self) -> list[str]:
        """Write all functions; return the lines of the body of `model`."""
        root = tree_of(self.graph, self.origins)
        items = self.items(root, root, own(""))
        outer = self.outer(own(""), root=True)
        body = Body({}, outer, self.reserved(), [])
        stateful = bool(self.graph.state)
        outputs = self.graph.outputs

        def result(resolve: Resolve) -> Expr:
            return Expr(f"{structure(outputs, resolve)}, {'new_state' if stateful else 'state'}")

        body.write(items, list(references(outputs)), result)
        has_own = any(item.new_state for item in items)
        return ["    new_state = {}", *body.lines] if has_own else body.lines

    def nested(self, graph: Graph, hints: Mapping[str, str]) -> "Module":
        """Return what writes a graph inside this one.

        Args:
          graph: The graph.
          hints: PyTorch's names of its inputs.
        """
        shared = (self.writing, self.functions, self._recomputed, self._special)
        return Module(graph, self.origins, self._classes, self._constants, [], *shared, hints)

    def is_state(self, value: str) -> bool:
        """Return whether a value is used as the new value of buffers alone."""
        return self._uses[value] == len(self.updates.get(value, []))

    def is_written_out(self, name: str) -> bool:
        """Return whether an input is a constant that the file contains."""
        given = self.given.get(name)
        return given is not None and given.kind == "constant" and self._constants(given) is not None

    def reserved(self) -> frozenset[str]:
        """Return the names that no value may have."""
        return RESERVED | self.writing.imports.keys() | self._names

    def items(self, block: Block, owner: Block, scope: Scope) -> list[Item]:
        """Return the items of a block, with those of the blocks that are written in place."""
        items: list[Item] = []
        for item in block.items:
            if isinstance(item, Node) and item.op in self._special:
                items.append(self._special[item.op](self, item, owner, scope))
            elif isinstance(item, Node):
                items += self._operation(item, owner, scope)
            elif (norm := self._batch_norm(item, scope)) is not None:
                norm.statements = self.statements(item, owner)
                items.append(norm)
            elif self._is_inline(item):
                items += self._named(self.items(item, owner, scope), item)
            else:
                items.append(self._call(item, owner, scope))
        return items

    def _named(self, items: list[Item], block: Block) -> list[Item]:
        """Return the items of a module with its name, unless it is a number."""
        name = (block.path or "").rpartition(".")[2]
        return [
            replace(item, called=item.called or identifier(name)) if name.isidentifier() else item for item in items
        ]

    def _is_inline(self, block: Block) -> bool:
        cls = self._class(block)
        if not cls.__module__.startswith("torch.nn"):
            return False
        return "container" in cls.__module__ or sum(1 for _ in block.nodes()) <= 3

    def _class(self, block: Block) -> type:
        return self._classes.get(block.path or "", object)

    def _operation(self, node: Node, owner: Block, scope: Scope) -> list[Item]:
        results = self.results.get(node.name, {})
        draws = self.writing.draws(node)
        if not results and not draws:
            return []
        places = sorted(results)
        several = len(places) > 1
        if len(places) == 1 and (like := self._shape_of_ancestor(node, owner)) is not None:
            return [self._view(node, like, results[0], owner)]
        item = Item(
            lambda resolve: self.writing.expression(node, places, resolve),
            list(references((node.args, node.kwargs))),
            results if several else {0: results[places[0]]},
            len(node.spec) if several and isinstance(node.spec, tuple) else 1,
            self.statements(node, owner),
            node.op.split(".")[1].strip("_") if "." in node.op else "x",
            draws=draws,
            named=self._named_operands(node),
        )
        found = [item]
        for value in results.values():
            for name in self.updates.get(value, []):
                found.append(self._update(value, name, scope))
        return found

    def _named_operands(self, node: Node) -> frozenset[str]:
        """Return the operands that are written as names.

        These are that of a view that keeps its leading sizes, and those of an operation in a region without autocast,
        in which other operations may not be written.
        """
        if node.in_float32:
            return frozenset(references((node.args, node.kwargs)))
        if node.op not in _VIEWS or not isinstance(node.spec, Spec) or not isinstance(node.args[0], Ref):
            return frozenset()
        size, shape = node.spec.shape, self._specs[node.args[0].name].shape
        keeps = len(size) > 1 and size[:1] == shape[:1] and size != shape
        return frozenset([node.args[0].name]) if keeps else frozenset()

    def _view(self, node: Node, like: tuple[str, int], result: str, owner: Block) -> Item:
        """Return a view with the leading sizes of another value."""
        (x, size), (ancestor, count) = node.args, like
        rest = size[count:] if len(size) - count > 1 else (-1,)

        def build(resolve: Resolve) -> Expr:
            shape = attribute(resolve(ancestor), "shape")
            lead = subscript(shape, Expr(f":{count - len(self._specs[ancestor].shape)}"))
            whole = count == len(self._specs[ancestor].shape)
            return method(resolve(x.name), "reshape", Expr(f"*{shape if whole else lead}"), *rest)

        return Item(build, [x.name, ancestor], {0: result}, 1, self.statements(node, owner), "view")

    def _shape_of_ancestor(self, node: Node, owner: Block) -> tuple[str, int] | None:
        """Return a value that a view's leading sizes come from, and their number, if its operand does not have them.

        Modules flatten the leading axes of a value and restore them later.
        """
        if node.op not in _VIEWS or not isinstance(node.spec, Spec) or not isinstance(node.args[0], Ref):
            return None
        size, value, own = node.spec.shape, node.args[0].name, {x.name: x for x in owner.nodes()}
        if len(size) < 2 or value not in own:
            return None
        if self._specs[value].shape[:1] == size[:1]:
            return None
        while value in own and (refs := [*references(own[value].args)]):
            chosen = next((name for name in refs if self._is_array(name)), None)
            if chosen is None:
                return None
            value, shape = chosen, self._specs[chosen].shape
            if shape[: len(size) - 1] == size[:-1] and len(shape) == len(size):
                return value, len(size) - 1
        return None

    def _is_array(self, name: str) -> bool:
        given = self.given.get(name)
        return isinstance(self._specs.get(name), Spec) and (given is None or given.kind == "input")

    def _update(self, value: str, name: str, scope: Scope) -> Item:
        found = scope.find(name)
        return Item(lambda resolve: resolve(value), [value], {}, new_state=name if found is None else found[1])

    def statements(self, item: "Node | Block", owner: Block) -> list[Any]:
        """Return PyTorch's statements being executed in a call of a module, outermost first."""
        node = next(item.nodes()) if isinstance(item, Block) else item
        calls = calls_of(node, self.origins)
        return statements(calls[owner.level].lines) if len(calls) > owner.level else []

    def _batch_norm(self, block: Block, scope: Scope) -> Item | None:
        if block.path is None or not self._class(block).__module__.endswith(".batchnorm"):
            return None
        return batch_norm_item(block, scope, self.given, self.results, self.graph.state)

    def _call(self, block: Block, owner: Block, scope: Scope) -> Item:
        path = block.path or ""
        found = scope.find(path)
        function = self._function(block, None if found is None else path)
        prefix = "" if found is None else found[1]

        def part(kind: str) -> Expr:
            return scope.tree(kind, path) or Expr(kind)

        def build(resolve: Resolve) -> Expr:
            flags = {"params": part("params"), "buffers": part("buffers"), "keys": Expr("keys"), "train": Expr("train")}
            before = [flags[flag] for flag in _FLAGS[:2] if flag in function.flags]
            after = [flags[flag] for flag in _FLAGS[2:] if flag in function.flags]
            return call(function.name, *before, *map(resolve, function.inputs), *after)

        last = [piece for piece in path.split(".") if not piece.isdigit()]
        return Item(
            build,
            list(function.inputs),
            dict(enumerate(function.outputs)),
            len(function.outputs),
            self.statements(block, owner),
            f"{last[-1]}_output" if last and last[-1] else "outputs",
            names=function.output_names,
            parameters=function.inputs,
            new_state=prefix if function.has_new_state else None,
            draws="keys" in function.flags,
        )

    def _function(self, block: Block, base: str | None) -> Function:
        """Write the function of a call of a module."""
        scope = own(base)
        items = self.items(block, block, scope)
        made = {value for item in items for value in item.results.values()}
        read = Counter(value for item in items for value in item.operands)
        inputs = [value for value in read if value not in made and self._outer_param(value, scope) is None]
        outputs = [v for item in items for v in item.results.values() if self._uses[v] > self._inside(block, v)]
        cls = self._class(block)
        forward = forward_of(cls)
        names = input_names(inputs, items, forward.parameters, self.hint, self.reserved())
        inputs.sort(key=lambda value: place_of(names[value], forward.parameters))
        has_new_state = any(item.new_state is not None for item in items)
        body = Body({names[v]: v for v in inputs}, self.outer(scope), self.reserved(), forward.aliases)
        returned = [Ref(value) for value in outputs]

        def result(resolve: Resolve) -> Expr:
            values = [resolve(ref.name).text for ref in returned] + ["new_state"] * has_new_state
            return Expr(", ".join(values))

        body.write(items, outputs, result)
        lines = ["    new_state = {}", *body.lines] if has_new_state else body.lines
        text = "\n".join(lines)
        flags = frozenset(flag for flag in _FLAGS if mentions(text, flag))
        before, after = ([flag for flag in part if flag in flags] for part in (_FLAGS[:2], _FLAGS[2:]))
        arguments = ", ".join(map(typed, [*before, *(names[value] for value in inputs), *after]))
        returned_type = result_type(["Array"] * len(outputs) + ["Tensors"] * has_new_state)
        shapes = self._shapes([(names[value], value) for value in inputs], outputs)

        file = file_of(cls.__module__)
        mark = ["@recomputed"] * (frozenset(node.name for node in block.nodes()) in self._recomputed)

        def written(name: str, doc: str) -> str:
            start = f"def {name}({arguments}) -> {returned_type}:"
            return "\n".join([*mark, start, *docstring(f"{cls.__name__} of {file}", doc), *lines])

        name = self.functions.add(snake_case(cls.__name__), f"{cls.__module__}.{cls.__qualname__}", written, shapes)
        return Function(
            name,
            flags,
            {value: names[value] for value in inputs},
            tuple(outputs),
            tuple(map(body.name_of, outputs)),
            has_new_state,
        )

    def _shapes(self, inputs: Sequence[tuple[str, str]], outputs: Sequence[str]) -> str:
        """Return what the docstring of a function says of shapes."""
        taken = ", ".join(f"{name} {shape_of(self._specs[value])}" for name, value in inputs)
        return f"{taken} -> {', '.join(shape_of(self._specs[value]) for value in outputs)}".strip()

    def _inside(self, block: Block, value: str) -> int:
        """Return how often a value is read by a block's own operations and as new state."""
        count = sum(list(references((node.args, node.kwargs))).count(value) for node in block.nodes())
        return count + len(self.updates.get(value, []))

    def hint(self, value: str) -> str:
        """Return PyTorch's name of a value, where it is made."""
        if value in self._hints:
            return self._hints[value]
        if value in self.given:
            given = self.given[value]
            return identifier(given.target.split(".")[-1] if given.kind != "input" else self._batch_name(given))
        for calls, node in self._makers(value):
            if node.op in (DETACH, LEAF):
                return self.hint(node.args[0].name)
            for lines in reversed(calls):
                for statement in reversed(statements(lines.lines)):
                    if statement.targets and statement.targets[0]:
                        return statement.targets[0]
            name = node.op.split(".")[1]
            operands = [*references((node.args, node.kwargs))]
            return self.hint(operands[0]) if name in _PASSING and len(operands) == 1 else identifier(name)
        return "x"

    def _makers(self, value: str) -> Any:
        for node in self.graph.nodes:
            if node.op != GETITEM and value in self.results.get(node.name, {}).values():
                yield calls_of(node, self.origins), node

    def _batch_name(self, given: Input) -> str:
        text = self._batch[int(given.target)]
        return text.split('"')[1] if '"' in text else "x"

    def _outer_param(self, value: str, scope: Scope) -> Expr | None:
        """Return the expression of a parameter, buffer or constant; None for other values."""
        given = self.given.get(value)
        if given is None or given.kind == "input":
            return None
        array = Expr("", 10, given.spec.shape, dtype_of(given.spec.dtype))
        if given.kind == "constant" and (constant := self._constants(given)) is not None:
            return constant.like(array)
        found = scope.tensor("params" if given.kind == "param" else "buffers", given.target)
        return None if found is None else found.like(array)

    def outer(self, scope: Scope, root: bool = False) -> Resolve:
        """Return the expressions of values without a name in a function, given what it can read."""

        def resolve(value: str) -> Expr:
            found = self._outer_param(value, scope)
            if found is not None:
                return found
            spec = self._specs[value]
            given = self.given.get(value)
            text = self._batch[int(given.target)] if root and given is not None else "?"
            return Expr(text, 10, *(() if isinstance(spec, tuple) else (spec.shape, dtype_of(spec.dtype))))

        return resolve


Special = Mapping[str, Callable[[Module, Node, Block, Scope], Item]]
"""By operation, from the writer of a graph, a node, the call whose function contains it and what that can read."""
