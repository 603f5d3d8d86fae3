"""Lines of source code in reports."""

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path

PARITY = Path(__file__).parent
HARNESS = (
    *(PARITY, *(PARITY / folder for folder in ("compare", "explain", "oracle", "sides", "unexercised", "verify"))),
    *(PARITY / "cases" / file for file in ("default_loss.py", "example_batches.py", "imported.py")),
)


def is_of_harness(file: str) -> bool:
    """Return whether a file is of what runs a case rather than of the case: the line of its caller is informative.

    >>> from parity.cases import imported
    >>> from parity.cases.built_in import mlp_case
    >>> is_of_harness(__file__), is_of_harness(imported.__file__), is_of_harness(mlp_case.__file__)
    (True, True, False)
    """
    path = Path(file)
    return path in HARNESS or path.parent in HARNESS


def source_line(file: str, line: int) -> str:
    """Return file, line number and text of a line.

    >>> source_line(linecache.__file__, 1).startswith("linecache.py:1: ")
    True
    """
    text = linecache.getline(file, line).strip()
    return f"{import_path(file)}:{line}: {text}" if text else f"{import_path(file)}:{line}"


def import_path(file: str) -> str:
    """Return the path of a file relative to its entry in `sys.path`.

    >>> import_path(linecache.__file__)
    'linecache.py'
    """
    roots = sorted((str(Path(root).resolve()) for root in sys.path), key=len, reverse=True)
    return next((file[len(root) + 1 :] for root in roots if file.startswith(f"{root}/")), file)


def built_line(file: str, line: int) -> str:
    """Return the line of a class that assigns what a line of its methods uses, with file and text.

    That is where a layer is constructed that the line calls, or a table computed that it indexes. It is empty for a
    line that uses no attribute of `self` that its class assigns.
    """
    try:
        tree = _tree(file)
    except (OSError, SyntaxError):
        return ""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _covers(node, line)]
    statements = [node for node in ast.walk(tree) if isinstance(node, _SIMPLE) and _covers(node, line)]
    if not classes or not statements:
        return ""
    used = [name for name, at in _of_self(statements[-1], ast.Load) if at == line]
    assigned = dict(reversed([*_of_self(classes[-1], ast.Store)]))
    return next((source_line(file, assigned[name]) for name in used if assigned.get(name, line) != line), "")


_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _of_self(node: ast.AST, context: type[ast.expr_context]) -> Iterator[tuple[str, int]]:
    """Attributes of `self` that are read or assigned, with their lines."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=found) if isinstance(found, context):
                yield name, part.lineno
