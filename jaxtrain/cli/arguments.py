"""Flags from dataclasses, by tyro, with errors in one line."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any, TypeVar

import tyro

from jaxtrain.errors import UserError
from jaxtrain.fields import brief, type_errors

T = TypeVar("T")


def parse(default: T, args: list[str], prog: str) -> T:
    """`default` with its fields replaced by the flags in `args`. Raises `UserError` for flags it cannot take."""
    _check_types(default)
    kind: Any = tyro.conf.OmitArgPrefixes[tyro.conf.FlagCreatePairsOff[type(default)]]  # type: ignore[misc]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed: T = tyro.cli(kind, default=default, args=args, prog=prog)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_first_paragraph(errors.getvalue())}; see {prog} --help") from None
    _check_paths(parsed)
    return parsed


def _check_types(settings: Any) -> None:
    """Raises `UserError` for a default of another type than its field, as a config.json may hold."""
    if wrong := type_errors(settings):
        raise UserError(f"{wrong[0]}: mend it")
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(value := getattr(settings, field.name)):
            _check_types(value)


def _check_paths(settings: Any) -> None:
    """Raises `UserError` for a path that the system cannot even be asked about."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            _check_paths(value)
        if isinstance(value, Path):
            try:
                value.stat()
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                pass  # what is to be there says so itself
            except (OSError, ValueError) as error:
                said = error.strerror if isinstance(error, OSError) else str(error)
                raise UserError(f"{field.name} {brief(str(value))} is no path ({said}): choose another") from None


def _first_paragraph(panel: str) -> str:
    """The body of tyro's error panel, between its title and its first rule, as one line."""
    # A value may have line breaks (of which splitlines knows more than the panel) and dashes of its own.
    _, *rows = [line.strip("│ ") for line in panel.split("\n")]
    rule = [len(row) > 8 and set(row) in ({"─"}, {"-"}, set("╰─╯")) for row in rows]
    begin = rule.index(False)
    return " ".join(rows[begin : rule.index(True, begin)] if True in rule[begin:] else rows[begin:]).rstrip(". ")
