"""Statements of Python source without their keyword, to be classified by the rest of the line."""

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.data.sources import Example

KEYWORDS = ("assert", "class", "def", "except", "for", "from", "if", "raise", "return", "with")
"""Labels of `python_statements`. `elif` and `while` are excluded: the same text follows them as follows `if`."""

_MIN_CHARACTERS = 8  # shorter lines do not determine the keyword


@dataclass(frozen=True, eq=False)
class Statements:
    """First lines of statements: item `i` is `{"text": line without its keyword, "label": keyword}`."""

    lines: tuple[tuple[str, str], ...]  # (keyword, rest)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int, /) -> Example:
        keyword, rest = self.lines[index]
        return {"text": rest, "label": keyword}


def python_statements(train_files: Sequence[Path], validation_files: Sequence[Path]) -> tuple[Statements, Statements]:
    """Return the statements of two groups of Python files as (train, validation), without duplicates.

    A line that both groups contain belongs to train. Files that are not UTF-8 or not valid Python are skipped.
    """
    seen: set[str] = set()
    return Statements(tuple(_new(train_files, seen))), Statements(tuple(_new(validation_files, seen)))


def statements(source: str) -> Iterator[tuple[str, str]]:
    """Yield (keyword, rest of the line) of every statement that starts with one of `KEYWORDS`.

    Raises SyntaxError if the source is not valid Python.

    Example:
      >>> list(statements("'''if it is text'''\\nfor x in y:\\n    if x: return x + 1"))
      [('for', 'x in y:'), ('if', 'x: return x + 1'), ('return', 'x + 1')]
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the source
        tree = ast.parse(source)
    lines = source.encode().split(b"\n")  # col_offset counts bytes
    positions = sorted(
        {(n.lineno, n.col_offset) for n in ast.walk(tree) if isinstance(n, ast.stmt | ast.ExceptHandler)}
    )
    for line, column in positions:
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
            if len(rest) >= _MIN_CHARACTERS and rest not in seen:
                seen.add(rest)
                yield keyword, rest
