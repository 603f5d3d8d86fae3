"""What the user's PyTorch code tells about names: targets of assignments, parameters of `forward`."""

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxtrain.torch_import.graph import Line


class Statement(NamedTuple):
    """A statement of PyTorch code.

    Attributes:
      place: File and first line.
      targets: Names that it assigns, in order; "" for what is no name.
      reads: Names that it reads.
    """

    place: tuple[str, int]
    targets: tuple[str, ...]
    reads: frozenset[str]


class Forward(NamedTuple):
    """A `forward` method.

    Attributes:
      parameters: Names of its parameters, without `self`.
      aliases: (line, new name, old name) of each assignment of one name to another.
    """

    parameters: tuple[str, ...]
    aliases: tuple[tuple[int, str, str], ...]


def file_of(module: str) -> str:
    """Return the name of a module's file, without its suffix: a user's file is imported under another name."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path).stem if path and module != "__main__" else module.rpartition(".")[2]


def statements(lines: Sequence[Line]) -> list[Statement]:
    """Return the statements being executed in a call of a module, from its `forward` inwards."""
    first = next((i for i, line in enumerate(lines) if line.function == "forward"), 0)
    found = (_by_line(line.file).get(line.number) for line in lines[first:])
    return [statement for statement in found if statement is not None]


@functools.cache
def forward_of(cls: type) -> Forward:
    """Return what is known of a class's `forward`."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    found = inspect.signature(forward).parameters.items()
    parameters = tuple(name for name, x in found if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL))[1:]
    try:
        lines, start = inspect.getsourcelines(forward)
        tree = ast.parse(_dedented(lines))
    except (OSError, TypeError, SyntaxError):
        return Forward(parameters, ())
    aliases = (
        (start + node.lineno - 1, node.targets[0].id, node.value.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name)
    )
    return Forward(parameters, tuple(sorted(aliases)))


def _dedented(lines: Sequence[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(line[indent:] if line.strip() else line for line in lines)


@functools.cache
def _by_line(file: str) -> dict[int, Statement]:
    """Return the innermost simple statement at each line of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr):
            reads = frozenset(x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load))
            statement = Statement((file, node.lineno), tuple(_targets(node)), reads)
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), statement))
    return found


def _targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        target: ast.expr = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        target = node.target
    else:
        return
    for item in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
        yield item.id if isinstance(item, ast.Name) else ""
