"""Flags from dataclasses, by tyro, with errors in one line."""

import contextlib
import io
from typing import Any, TypeVar

import tyro

from jaxtrain.errors import UserError

T = TypeVar("T")


def parse(default: T, args: list[str], prog: str) -> T:
    """`default` with its fields replaced by the flags in `args`. Raises `UserError` for flags it cannot take."""
    kind: Any = tyro.conf.OmitArgPrefixes[tyro.conf.FlagCreatePairsOff[type(default)]]  # type: ignore[misc]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed: T = tyro.cli(kind, default=default, args=args, prog=prog)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_first_paragraph(errors.getvalue())}; see {prog} --help") from None
    return parsed


def _first_paragraph(panel: str) -> str:
    """The body of tyro's error panel, between its title and its first rule, as one line."""
    _, *rows = [line.strip("│ ") for line in panel.splitlines()]
    wordless = [not any(c.isalnum() for c in row) for row in rows]
    begin = wordless.index(False)
    end = wordless.index(True, begin) if True in wordless[begin:] else len(rows)
    return " ".join(rows[begin:end]).rstrip(".")
