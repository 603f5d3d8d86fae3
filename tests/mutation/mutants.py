"""Changes of one expression or statement of a source file that change what it computes."""

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}
_NAMES = {
    name: other
    for pair in (("min", "max"), ("minimum", "maximum"), ("any", "all"), ("floor", "ceil"), ("argmin", "argmax"))
    for name, other in (pair, pair[::-1])
}
_TEXT = ("UserError", "warn", "print", "ValueError", "TypeError", "AssertionError")
"""Calls whose arguments are messages."""
_SYMMETRIC = ("swapaxes", "gcd", "lcm", "array_equal", "promote_types", "logical_and", "logical_or")
"""Calls whose two arguments have no order."""


class Mutant(NamedTuple):
    """A changed source file.

    Attributes:
      file: The file, relative to the repository.
      line: The line that is changed.
      before: The expression or statement there.
      after: What is in its place.
      source: The file's text with it.
    """

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


class Site(NamedTuple):
    """A place of a source file, and what may stand there."""

    file: str
    node: ast.expr | ast.stmt
    changed: ast.AST

    def mutant(self, source: str) -> Mutant | None:
        """Return the file's text with the change; None inside an f-string."""
        before, after = ast.unparse(self.node), ast.unparse(self.changed)
        start, end = _offsets(source, self.node)
        new = source[:start] + (after if isinstance(self.node, ast.stmt) else f"({after})") + source[end:]
        try:
            ast.parse(new)
        except SyntaxError:
            return None
        return Mutant(self.file, self.node.lineno, _short(before), _short(after), new)


def sites(file: str, source: str) -> Iterator[Site]:
    """Yield the changes of a file's functions: comparisons, arithmetic, conditions, numbers, flags, names of functions,
    arguments in another order, and removed statements. Messages, annotations and docstrings stay.

    Args:
      file: The file, relative to the repository.
      source: Its text.
    """
    for node in _computing(ast.parse(source)):
        yield from (Site(file, node, changed) for changed in _changes(node))


def _computing(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements inside functions that compute something."""
    for function in ast.walk(node):
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("__repr"):
            for statement in function.body:
                yield from _inside(statement)


def _inside(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    if isinstance(node, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _TEXT:
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # zip's strict asserts equal lengths
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _inside(child)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            new.ops = [_COMPARISONS[type(op)]()]
            yield new
        case ast.BinOp(op=op, left=left) if type(op) in _ARITHMETIC and not _is_text(left):
            new.op = _ARITHMETIC[type(op)]()
            yield new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield new
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield new
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            new.func = ast.Name(_NAMES[name])
            yield new
        case ast.Call(func=ast.Attribute(attr=name)) if name in _NAMES:
            assert isinstance(new.func, ast.Attribute)
            new.func.attr = _NAMES[name]
            yield new
        case ast.Call(func=func, args=[a, b]) if not isinstance(a, ast.Constant | ast.Starred):
            if ast.unparse(func).rpartition(".")[2] not in _SYMMETRIC:
                new.args = [b, a]
                yield new
        case ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _reads(value, name):
            yield ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _reads(value: ast.expr, name: str) -> bool:
    return any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(value))


def _offsets(source: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
