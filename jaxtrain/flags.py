"""The fields of dataclasses as flags of a command line: one parser for every command.

A field is a flag, its docstring the help, its annotation what a value must be: a number, a string, a path, a boolean, a
`Literal`, None beside one of them, or a tuple of them. Bounds (`jaxtrain.fields`) are in the help; they are checked
where all values of the dataclass are. argparse has the rules of the command line; errors are one line.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import re
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxtrain.errors import UserError
from jaxtrain.fields import abbreviated, bounds, brief, type_errors


@dataclass(frozen=True)
class Flag:
    """How a field is written on the command line: the metadata of its `Annotated` type.

    Attributes:
      name: Name of the flag, without dashes; None for the field's.
      short: Another name, such as "-n".
      metavar: The value in the help.
      bare: Returns the value of the flag alone, for a flag whose value may be left out.
      choices: What a given value must be; none for any value of the field's type.
      positional: Whether the arguments without a flag are the field's: all those of a tuple, or one, which may be left
        out unless the default is "".
      listed: Whether the values of a tuple are separated by commas, and the flag may be repeated.
    """

    name: str | None = None
    short: str | None = None
    metavar: str | None = None
    bare: Callable[[], Any] | None = None
    choices: tuple[str, ...] = ()
    positional: bool = False
    listed: bool = False


T = TypeVar("T")
R = TypeVar("R")


def parse(default: T, args: Sequence[str], prog: str) -> T:
    """Return a dataclass instance with the fields replaced that `args` sets. --help prints its flags and exits.

    Args:
      default: The instance. The docstring of its class is the first paragraph of the help.
      args: Arguments of a command line.
      prog: Program name in the help and in errors.

    Raises:
      UserError: An argument is unknown, or a value has the wrong type.

    Example:
      >>> from dataclasses import dataclass
      >>> @dataclass(frozen=True)
      ... class Sizes:
      ...     width: int = 64
      ...     rate: float | None = None
      >>> parse(Sizes(), ["--width", "32"], "train")
      Sizes(width=32, rate=None)
      >>> parse(Sizes(), ["--widht", "32"], "train")
      Traceback (most recent call last):
      jaxtrain.errors.UserError: unrecognized arguments: --widht 32, did you mean --width; see train --help
    """
    (value,) = _all_parsed((default,), args, prog, None)
    return value


def parse_both(first: T, second: R, args: Sequence[str], prog: str, summary: str | None) -> tuple[T, R]:
    """Return two dataclass instances with the fields replaced that `args` sets: a command's options and a recipe.

    Args:
      first: The options.
      second: The recipe, whose fields have other names.
      args: Arguments of a command line.
      prog: Program name in the help and in errors.
      summary: First paragraph of the help; None for none.

    Raises:
      UserError: An argument is unknown, a value has the wrong type, or both have a field of one name.
    """
    options, recipe = _all_parsed((first, second), args, prog, summary or "")
    return options, recipe


def _all_parsed(defaults: Sequence[Any], args: Sequence[str], prog: str, summary: str | None) -> list[Any]:
    values, unknown = _parsed(defaults, args, prog, summary, add_help=True)
    if unknown:
        known = [flag for default in defaults for field in _fields(default) for flag in field.flags]
        close = [
            difflib.get_close_matches(arg.partition("=")[0], known, n=1, cutoff=0.75)
            for arg in unknown
            if arg[:1] == "-"
        ]
        meant = sorted({name for names in close for name in names})
        proposal = f", did you mean {' and '.join(meant)}" if meant else ""
        raise UserError(f"unrecognized arguments: {' '.join(map(abbreviated, unknown))}{proposal}; see {prog} --help")
    return values


def parse_known(default: T, args: Sequence[str], prog: str) -> tuple[T, list[str]]:
    """Return a dataclass instance with the fields replaced that `args` sets, and the arguments that are not its own.

    --help is not among its own.
    """
    (value,), unknown = _parsed([default], args, prog, None, add_help=False)
    return value, unknown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise `UserError` in the place of printing the usage and exiting."""
        message = re.sub(r"^argument (?:-\w/)?(--[\w-]+)(?:/--[\w-]+)?: ", r"\1 ", message)
        message = re.sub(r" (expected .* argument|expected at least .*)$", " needs a value", message)
        message = re.sub(r" ignored explicit argument .*", " takes no value", message, flags=re.DOTALL)
        raise UserError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass, as a flag.

    Attributes:
      name: The field's name.
      hint: Its type, without metadata.
      flag: How it is written.
      default: Its value if the flag is not given.
      help: Its docstring.
    """

    name: str
    hint: Any
    flag: Flag
    default: Any
    help: str

    @property
    def flags(self) -> list[str]:
        """The names on the command line."""
        if self.flag.positional:
            return []
        name = (self.flag.name or self.name).replace("_", "-")
        negative = [f"--no-{name}"] if self.hint is bool else []
        return [*([self.flag.short] if self.flag.short else []), f"--{name}", *negative]

    @property
    def metavar(self) -> str:
        """The value in the help."""
        return self.flag.metavar or _metavar(self.hint)

    @property
    def usage(self) -> str:
        """A positional argument in the usage."""
        return f"{self.metavar}…" if get_origin(self.hint) is tuple else self.metavar

    def add_to(self, group: Any) -> None:
        """Add the flag to a group of a parser."""
        settings: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": self.help}
        if self.hint is bool:
            settings["action"] = argparse.BooleanOptionalAction
            # Its other name is added by the action.
            group.add_argument(*self.flags[:-1], **settings)
            return
        convert = functools.partial(_value, hint=self.hint, flag=self.flag)
        if self.flag.listed:
            settings["action"] = "extend"
            settings["type"] = lambda text: [convert(part) for part in text.split(",")]
        elif get_origin(self.hint) is tuple:
            settings["nargs"] = "*"
        elif self.flag.positional and self.default != "":
            settings["nargs"] = "?"
        elif self.flag.bare is not None:
            settings |= {"nargs": "?", "const": _BARE}
        if self.flag.positional:
            group.add_argument(settings.pop("dest"), type=convert, metavar=self.metavar, **settings)
        else:
            group.add_argument(*self.flags, metavar=self.metavar, **{"type": convert, **settings})

    def value(self, given: Any) -> Any:
        """Return the field's value for what the parser read."""
        if given is _BARE:
            assert self.flag.bare is not None
            return self.flag.bare()
        return tuple(given) if get_origin(self.hint) is tuple else given


_BARE = object()


def _parsed(
    defaults: Sequence[Any], args: Sequence[str], prog: str, summary: str | None, add_help: bool
) -> tuple[list[Any], list[str]]:
    for default in defaults:
        if wrong := type_errors(default):
            raise UserError(f"{wrong[0]}: fix it")
    _check_values(args)
    summary = inspect.getdoc(type(defaults[0])) if summary is None else summary
    fields = [_fields(default) for default in defaults]
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *(x.usage for x in fields[0] if x.flag.positional), "[OPTIONS]"]),
        description=_paragraph(summary or ""),
        add_help=add_help,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26),
    )
    for default, of_default in zip(defaults, fields, strict=True):
        group = parser if default is defaults[0] else parser.add_argument_group(f"fields of {type(default).__name__}")
        for field in of_default:
            with contextlib.suppress(argparse.ArgumentError):
                field.add_to(group)
                continue
            raise UserError(f"{type(default).__name__}.{field.name} has the name of a flag of {prog}: rename it")
    given, unknown = parser.parse_known_args(_normal(args))
    values = []
    for default, of_default in zip(defaults, fields, strict=True):
        changed = {x.name: x.value(getattr(given, x.name)) for x in of_default if hasattr(given, x.name)}
        values.append(dataclasses.replace(default, **changed))
        _check_paths(values[-1])
    return values, unknown


def _fields(default: Any) -> list[_Field]:
    kind: Any = type(default)
    hints, docs, limits = get_type_hints(kind, include_extras=True), field_docs(kind), bounds(kind)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        flag = next((x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Flag)), Flag())
        value = getattr(default, field.name)
        doc, limit = docs.get(field.name, ""), limits.get(field.name, ())[:1]
        is_said = flag.positional or "default" in doc or (value is None and doc != "" and "None" not in doc)
        facts = [] if is_said else [f"default: {value}"]
        facts += [bound.must.removeprefix("be ") for bound in limit]
        text = f"{doc} ({', '.join(facts)})" if facts else doc
        plain = _plain(hint, f"{kind.__name__}.{field.name}")
        found.append(_Field(field.name, plain, flag, value, text.replace("%", "%%").strip()))
    return found


def _plain(hint: Any, name: str) -> Any:
    """Return a type of values that can be written on a command line, without metadata."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0], name)
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_plain(part, name) for part in parts)]  # noqa: UP007 - of parts known at run time
    if get_origin(hint) is tuple:
        inner = {_plain(part, name) for part in parts if part is not ...}
        if len(inner) == 1:
            return tuple[(inner.pop(), ...)]  # type: ignore[misc]
    if hint in (int, float, str, bool, Path, types.NoneType) or get_origin(hint) is Literal:
        return hint
    raise UserError(f"{name} has the type {hint}, which no flag can have: use a number, a string, a path or a boolean")


def _value(text: str, hint: Any, flag: Flag) -> Any:
    """Return the value that an argument stands for."""
    if flag.choices:
        if text not in flag.choices:
            bare = ", or without a value" if flag.bare is not None else ""
            raise argparse.ArgumentTypeError(f"must be {_or(flag.choices)}{bare}, got {brief(text)}")
        return text
    parts = (
        get_args(hint) if get_origin(hint) is Union else get_args(hint)[:1] if get_origin(hint) is tuple else (hint,)
    )
    if types.NoneType in parts and text == "None":
        return None
    parts = tuple(part for part in parts if part is not types.NoneType)
    for part in parts:
        with contextlib.suppress(ValueError):
            return _CONVERT[part](text) if part in _CONVERT else _constant(text, get_args(part))
    kinds = _or([_KINDS[part] if part in _KINDS else _or(map(str, get_args(part))) for part in parts])
    raise argparse.ArgumentTypeError(f"must be {kinds}, got {brief(text)}{_remedy(text, parts)}")


def _constant(text: str, values: Sequence[Any]) -> Any:
    """Return the value that is written as `text`; raise ValueError for another text."""
    return values[[str(value) for value in values].index(text)]


_CONVERT: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    Path: Path,
    bool: functools.partial(_constant, values=(True, False)),
}
_KINDS = {int: "an integer", float: "a number", str: "a string", Path: "a path", bool: "True or False"}


def _remedy(text: str, parts: Sequence[Any]) -> str:
    """Return the remedy for a number such as 1e3, which is an integer in another form."""
    with contextlib.suppress(ValueError, OverflowError):
        if int in parts and float(text) == int(float(text)):
            return f": use {int(float(text))}"
    return ""


def _or(words: Any) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Union:
        return "|".join(_metavar(part) for part in get_args(hint) if part is not types.NoneType)
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    return _metavar(get_args(hint)[0]) if get_origin(hint) is tuple else hint.__name__.upper()


def _paragraph(text: str) -> str:
    """Return the first paragraph of a text as one line."""
    return " ".join(text.partition("\n\n")[0].split()).replace("%", "%%")


def _normal(args: Sequence[str]) -> list[str]:
    """Return arguments with hyphens in the names of flags, and with negative amounts joined to their flags.

    argparse takes some of them, such as -1e-3 and -3GiB, for flags.
    """
    found: list[str] = []
    for arg in args:
        name, mark, value = arg.partition("=")
        if re.match(r"-(\.?\d|inf|nan)", arg) and found and re.fullmatch(r"--[\w-]+", found[-1]):
            found[-1] += f"={arg}"
        else:
            found.append(f"{name.replace('_', '-')}{mark}{value}" if name.startswith("--") else arg)
    return found


def _check_values(args: Sequence[str]) -> None:
    """Raise `UserError` for a flag with an empty value, as of an unset variable of the shell, or with --."""
    for i, flag in enumerate(args):
        name, mark, given = flag.partition("=")
        if name.startswith("--") and ([given] if mark else [*args[i + 1 : i + 2]]) == [""]:
            raise UserError(f"{name} is empty: give it a value, or leave it out")
        if given == "--":  # which argparse drops from the values
            raise UserError(f"{name} must not be --: give it another value")


def _check_paths(settings: Any) -> None:
    """Raise `UserError` for a path that the system rejects even for a lookup."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Path):
            try:
                value.stat()
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                pass  # whoever needs the file reports this
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise UserError(
                    f"{field.name} {brief(str(value))} is not a valid path ({reason}): use another"
                ) from None


def check_writable(path: Path | None) -> None:
    """Raise `UserError` for a file that a command is to write at its end, and could not."""
    if path and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise UserError(f"'{path}' cannot be written: name a file in a writable folder")


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, those of its bases included: the strings below them.

    >>> from jaxtrain.run import Recipe
    >>> field_docs(Recipe)["steps"]
    'Number of optimizer updates.'
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _own_docs(base)
    return found


def _own_docs(kind: type) -> dict[str, str]:
    if not inspect.get_annotations(kind):
        return {}
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # a class of an interactive session has no source
        return {}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
