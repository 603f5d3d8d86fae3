"""A recorded program as a module, which computes it again from its modules, its constants and a batch.

Its `forward` is compiled with the file and the lines of the script, which errors and written source then name.
"""

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from jaxtrain.port.calls import Call, Program, Step, Value
from jaxtrain.port.inputs import AFTER_UPDATE, CARRIED, Inputs
from jaxtrain.torch_import import Line

CONSTANT = "constant_"
"""Prefix of the buffers of a recorded program's own constants."""
KEPT = "carried_"
"""Prefix of the buffers that hold what one program keeps for the next one."""


def recorded_module(
    program: Program,
    modules: Mapping[str, torch.nn.Module],
    inputs: Inputs,
    carried: dict[str, torch.Tensor],
    *,
    restore: Callable[[int], None] | None = None,
) -> torch.nn.Module:
    """Return a module that computes the loss of a recorded program, from the tensors of `inputs.batch_of` by name.

    Args:
      program: The program.
      modules: The script's modules, by the name that they have in this one.
      inputs: Where the roots of the program come from.
      carried: What programs keep for later ones, by name: buffers, which this one sets. One of other sizes is added.
      restore: Called before each call that draws random numbers, with its place in the program. With it, calls are in
        the autocast regions of the script; without it, the whole loss is thought to be in one, and calls that were in
        none leave it.
    """
    found = _Writer(program, modules, inputs, kept_names(inputs, carried), restore)
    module = type("Script", (torch.nn.Module,), {"forward": found.forward()})()
    for name, part in modules.items():
        module.add_module(name, part)
    for value, tensor in inputs.constants.items():
        module.register_buffer(f"{CONSTANT}{abs(value.number)}", tensor, persistent=False)
    for buffer in kept_names(inputs, carried).values():
        module.register_buffer(f"{KEPT}{buffer}", carried[buffer])
    return module


def kept_names(inputs: Inputs, carried: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the names in `carried` of what a program keeps: those of other sizes have names with these."""
    found = {}
    for name, sizes in inputs.sizes.items():
        other = f"{name}_{'x'.join(map(str, sizes))}"
        found[name] = name if tuple(carried[name].shape) == sizes else other
        carried.setdefault(found[name], carried[name].new_zeros(sizes))
    return found


class _Writer:
    """Writes `forward` as a syntax tree."""

    def __init__(
        self,
        program: Program,
        modules: Mapping[str, torch.nn.Module],
        inputs: Inputs,
        buffers: Mapping[str, str],
        restore: Callable[[int], None] | None,
    ) -> None:
        self._program, self._inputs, self._kept, self._restore = program, inputs.batch, inputs.kept, restore
        self._carried, self._buffers = inputs.carried, buffers
        self._lead, self._changes = inputs.lead, inputs.changes
        self._paths = {id(part): name for root in modules for name, part in _named(root, modules[root])}
        self._owned = {value: name.split(".") for value, name in inputs.owned.items()}
        self._autocast = next((call.ambient.autocast for call in program.calls if call.ambient.autocast), None)
        self._names: dict[str, Any] = {}
        self._like: Value | None = None

    def forward(self) -> FunctionType:
        """Return the function."""
        body = [self._leaf(name) for value, name in self._inputs.items() if value in self._program.leaves]
        body += [self._read_kept(name) for name in self._carried]
        statements = [self._statements(i, call) for i, call in enumerate(self._program.calls)]
        lead = self._lead if self._restore is None else 0
        body += self._after_update([*itertools.chain(*statements[:lead])]) if lead else []
        body += itertools.chain(*statements[lead:])
        body += [self._keep(name, value) for name, value in self._kept.items()]
        body.append(ast.Return(self._result()))
        arguments = [ast.arg("self"), *(ast.arg(name) for name in self._inputs.values())]
        arguments += [ast.arg(CARRIED)] if self._carried else []
        arguments += [ast.arg(AFTER_UPDATE)] if self._lead else []
        empty: Any = {"posonlyargs": [], "kwonlyargs": [], "kw_defaults": [], "defaults": []}
        function = ast.FunctionDef("forward", ast.arguments(args=arguments, **empty), body, [])
        first = self._program.calls[0].line if self._program.calls else Line("", 1, "")
        function.lineno = function.end_lineno = first.number
        function.col_offset = function.end_col_offset = 0
        tree = ast.fix_missing_locations(ast.Module([function], []))
        exec(compile(tree, first.file or "<recorded>", "exec", dont_inherit=True), self._names)
        made: FunctionType = self._names.pop("forward")
        return made

    def _result(self) -> ast.expr:
        """Return the loss; where the script is made again, the parts that `backward` is called on."""
        parts = self._program.parts if self._restore is not None else ()
        return self._expression(parts or self._program.loss)

    def _after_update(self, lead: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return what follows an update, which changes parameters and buffers only if there was one."""
        no_grad = [ast.withitem(ast.Call(self._given("no_grad", torch.no_grad), [], []))]
        before, after = list[ast.stmt](), list[ast.stmt]()
        for i, name in enumerate(self._changes):
            own, old = _attribute(["self", *name.split(".")]), f"before_{i}"
            clone = ast.Call(ast.Attribute(own, "clone", ast.Load()), [], [])
            before.append(ast.Assign([ast.Name(old, ast.Store())], clone))
            which: list[ast.expr] = [ast.Name(AFTER_UPDATE, ast.Load()), own, ast.Name(old, ast.Load())]
            new = ast.Call(self._given("where", torch.where), which, [])
            after.append(ast.Expr(ast.Call(ast.Attribute(own, "copy_", ast.Load()), [new], [])))
        added = [ast.With(no_grad, before), ast.With(no_grad, after)]
        for statement in added:
            _place(statement, lead[0].lineno)
        return [added[0], *lead, added[1]]

    def _leaf(self, name: str) -> ast.stmt:
        """Return the statement from which on an input requires a gradient."""
        detached = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "detach", ast.Load()), [], [])
        leaf = ast.Call(ast.Attribute(detached, "requires_grad_", ast.Load()), [], [])
        return ast.Assign([ast.Name(name, ast.Store())], leaf)

    def _read_kept(self, name: str) -> ast.stmt:
        """Return the statement that reads what the program before has kept, or what is given anew."""
        which = [
            ast.Name(CARRIED, ast.Load()),
            _attribute(["self", f"{KEPT}{self._buffers[name]}"]),
            ast.Name(name, ast.Load()),
        ]
        return ast.Assign([ast.Name(name, ast.Store())], ast.Call(self._given("where", torch.where), [*which], []))

    def _keep(self, name: str, value: Value) -> ast.stmt:
        """Return the statement that keeps a tensor for the next program."""
        copy = ast.Attribute(_attribute(["self", f"{KEPT}{self._buffers[name]}"]), "copy_", ast.Load())
        detached = ast.Call(ast.Attribute(self._expression(value), "detach", ast.Load()), [], [])
        return ast.Expr(ast.Call(copy, [detached], []))

    def _statements(self, i: int, call: Call) -> list[ast.stmt]:
        """Return the statements of a call, with the script's line."""
        self._like = next((x for x in call.reads() if not x.is_number), None)
        value = self._called(call)
        statements: list[ast.stmt]
        if len(call.results) == 1 and not call.results[0][0]:
            statements = [ast.Assign([ast.Name(_name(call.results[0][1]), ast.Store())], value)]
        else:
            statements = [ast.Assign([ast.Name("result", ast.Store())], value)]
            for path, made in call.results:
                statements.append(ast.Assign([ast.Name(_name(made), ast.Store())], self._part(path)))
        if call.is_repeated and id(call.function) in self._paths:
            copies = ast.Call(
                self._given("with_copied_buffers", _with_copied_buffers), [self._callee(call.function)], []
            )
            statements = [ast.With([ast.withitem(copies)], statements)]
        for context in self._contexts(call):
            statements = [ast.With([ast.withitem(ast.Call(context, [], []))], statements)]
        if self._restore is not None and call.random is not None:
            statements.insert(0, ast.Expr(ast.Call(self._given("restore", self._restore), [ast.Constant(i)], [])))
        for statement in statements:
            _place(statement, call.line.number)
        return statements

    def _called(self, call: Call) -> ast.expr:
        """Return a call, or the attribute of a tensor that it reads, as an expression."""
        args = [self._expression(x) for x in call.args]
        if call.sets_data:
            return ast.Call(ast.Attribute(args[0], "copy_", ast.Load()), args[1:], [])
        attribute = getattr(getattr(call.function, "__self__", None), "__name__", "")
        if getattr(call.function, "__name__", "") == "__get__" and attribute.isidentifier():
            return ast.Attribute(args[0], attribute, ast.Load())
        keywords = [ast.keyword(name, self._expression(x)) for name, x in call.kwargs.items()]
        return ast.Call(self._callee(call.function), args, keywords)

    def _contexts(self, call: Call) -> Iterator[ast.expr]:
        if not call.ambient.grad or call.sets_data:
            yield self._given("no_grad", torch.no_grad)
        if self._restore is None:
            if self._autocast is not None and call.ambient.autocast is None:
                yield self._given("without_autocast", _Autocast(self._autocast, enabled=False))
        elif call.ambient.autocast is not None:
            yield self._given("autocast", _Autocast(call.ambient.autocast, enabled=True))

    def _callee(self, function: Callable[..., Any]) -> ast.expr:
        if id(function) in self._paths:
            return _attribute(["self", *self._paths[id(function)].split(".")])
        return self._given(getattr(function, "__name__", type(function).__name__).strip("_") or "function", function)

    def _part(self, path: Sequence[Step]) -> ast.expr:
        part: ast.expr = ast.Name("result", ast.Load())
        for kind, key in path:
            part = (
                ast.Subscript(part, self._expression(key), ast.Load())
                if kind == "item"
                else ast.Attribute(part, key, ast.Load())
            )
        return part

    def _expression(self, x: Any) -> ast.expr:
        """Return an argument as an expression."""
        if isinstance(x, Value):
            if x.is_number and self._like is not None:  # a number, which has the dtype of the tensors beside it
                dtype = ast.Attribute(self._expression(self._like), "dtype", ast.Load())
                return ast.Call(ast.Attribute(ast.Name(self._inputs[x], ast.Load()), "to", ast.Load()), [dtype], [])
            if x in self._inputs:
                return ast.Name(self._inputs[x], ast.Load())
            if x in self._owned:
                return _attribute(["self", *self._owned[x]])
            if x in self._program.roots:
                return _attribute(["self", f"{CONSTANT}{abs(x.number)}"])
            return ast.Name(_name(x), ast.Load())
        if isinstance(x, tuple):
            return ast.Tuple([self._expression(item) for item in x], ast.Load())
        if isinstance(x, list):
            return ast.List([self._expression(item) for item in x], ast.Load())
        if isinstance(x, dict):
            return ast.Dict([self._expression(key) for key in x], [self._expression(item) for item in x.values()])
        if isinstance(x, slice):
            ends = [self._expression(end) for end in (x.start, x.stop, x.step)]
            return ast.Call(self._given("slice", slice), ends, [])
        if x is None or x is ... or type(x) in (bool, int, str) or (type(x) is float and x - x == 0):
            return ast.Constant(x)
        return self._given(type(x).__name__, x)

    def _given(self, name: str, value: Any) -> ast.expr:
        """Return a name for an object that the function reads."""
        found = next((key for key, known in self._names.items() if known is value), None)
        if found is None:
            count = sum(key.rstrip("0123456789").rstrip("_") == name for key in self._names)
            found = f"{name}_{count}"
            found = found if found.isidentifier() else f"given_{len(self._names)}"
            self._names[found] = value
        return ast.Name(found, ast.Load())


@contextlib.contextmanager
def _with_copied_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Let a module change copies of its buffers: the first of two equal calls has changed them."""
    own = [(part._buffers, name, x) for part in module.modules() for name, x in part._buffers.items() if x is not None]
    for buffers, name, x in own:
        buffers[name] = x.clone()
    try:
        yield
    finally:
        for buffers, name, x in own:
            buffers[name] = x


class _Autocast:
    """Makes an autocast region, or one without autocast, as a function that copies of a module may share."""

    def __init__(self, region: tuple[torch.dtype, str], *, enabled: bool) -> None:
        self._region, self._enabled = region, enabled

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        dtype, device = self._region
        return torch.autocast(device, dtype, enabled=self._enabled)


def _place(statement: ast.stmt, line: int) -> None:
    """Give a statement the line of the script."""
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0


def _named(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for path, part in module.named_modules():
        yield f"{name}.{path}" if path else name, part


def _name(value: Value) -> str:
    return f"v{value.number}"


def _attribute(path: Sequence[str]) -> ast.expr:
    expression: ast.expr = ast.Name(path[0], ast.Load())
    for name in path[1:]:
        if name.isidentifier():
            expression = ast.Attribute(expression, name, ast.Load())
        else:  # a part of a container, by its number
            expression = ast.Subscript(expression, ast.Constant(int(name)), ast.Load())
    return expression
