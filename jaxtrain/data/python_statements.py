"""Statements of Python source without the keyword they begin with: which it was can be told from the rest."""

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.data.source import Example

KEYWORDS = ("assert", "class", "def", "except", "for", "from", "if", "raise", "return", "with")
"""Those that say what a statement is. `elif` and `while` are not among them: they are followed as `if` is."""

_SHORTEST = 8  # characters of a rest: less says nothing


@dataclass(frozen=True, eq=False)
class Statements:
    """First lines of statements: item `i` is `{"text": the line without its keyword, "label": the keyword}`."""

    lines: tuple[tuple[str, str], ...]  # (keyword, rest)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int, /) -> Example:
        keyword, rest = self.lines[index]
        return {"text": rest, "label": keyword}


def python_statements(train_files: Sequence[Path], validation_files: Sequence[Path]) -> tuple[Statements, Statements]:
    """The statements of two groups of Python files, each rest of a line once: what both have is to train on.

    Files that are no UTF-8, or no Python of this version, are passed over.
    """
    seen: set[str] = set()
    return Statements(tuple(_new(train_files, seen))), Statements(tuple(_new(validation_files, seen)))


def statements(source: str) -> Iterator[tuple[str, str]]:
    """(keyword, rest of its line) of each statement of a program that begins with one of `KEYWORDS`, by line.

    >>> list(statements("'''if it is text'''\\nfor x in y:\\n    if x: return x + 1"))
    [('for', 'x in y:'), ('if', 'x: return x + 1'), ('return', 'x + 1')]

    Raises SyntaxError for what is no Python program.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes, which are the source's own business
        tree = ast.parse(source)
    lines = source.encode().split(b"\n")  # columns are counted in bytes
    places = sorted({(n.lineno, n.col_offset) for n in ast.walk(tree) if isinstance(n, ast.stmt | ast.ExceptHandler)})
    for line, column in places:
        keyword, _, rest = lines[line - 1][column:].decode().strip().partition(" ")
        if keyword in KEYWORDS:
            yield keyword, rest


def _new(files: Sequence[Path], seen: set[str]) -> Iterator[tuple[str, str]]:
    for file in files:
        try:
            found = list(statements(file.read_text("utf-8")))
        except (UnicodeDecodeError, SyntaxError):
            continue
        for keyword, rest in found:
            if len(rest) >= _SHORTEST and rest not in seen:
                seen.add(rest)
                yield keyword, rest
