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
    """What stands between the frame and the first rule of tyro's error panel, as one line."""
    rows = [line.strip("│ ") for line in panel.splitlines() if line.startswith("│")]
    rule = next((i for i, row in enumerate(rows) if row.startswith("──")), len(rows))
    return " ".join(rows[:rule]).rstrip(".") or panel.strip()
