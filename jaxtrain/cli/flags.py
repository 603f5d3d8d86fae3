"""Parse flags into dataclasses with tyro; report errors in one line."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jaxtrain.cli import nearest
from jaxtrain.errors import UserError
from jaxtrain.fields import brief, type_errors
from jaxtrain.recipes import RECIPES
from jaxtrain.run import Recipe, is_reference, load_recipe

_NOT_A_NUMBER = re.compile(r"Error parsing (--\S+): (invalid literal for int\(\).*|could not convert string.*): (.*)")
_MEANT = re.compile(r"(?:Perhaps you meant|Arguments similar to --\S+):\W*(--[\w-]+)")

T = TypeVar("T")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class WithRecipe(Generic[O, R]):
    """A command's own options next to the fields of a recipe, all of which are flags."""

    options: Annotated[O, tyro.conf.arg(name="")]
    recipe: R


def parse(default: T, args: list[str], prog: str) -> T:
    """Return `default` with the fields replaced that `args` sets.

    Args:
      default: Instance of a dataclass; its type defines the flags and its docstrings their help.
      args: Command line arguments.
      prog: Program name for the help and for errors.

    Raises:
      UserError: An argument is unknown or its value is invalid.
    """
    parsed, _ = _parse(type(default), default, args, prog)
    return parsed


def parse_known(default: T, args: list[str], prog: str) -> tuple[T, list[str]]:
    """Return `default` with the fields replaced that `args` sets, and the arguments that are not its own.

    --help is not among its own.
    """
    return _parse(type(default), default, args, prog, return_unknown_args=True, add_help=False)


def parse_with_recipe(options: O, recipe: R, args: list[str], prog: str, summary: str | None) -> WithRecipe[O, R]:
    """Return a command's options and a recipe, with the fields of both replaced that `args` sets.

    `summary` is the first paragraph of the help.
    """
    default = WithRecipe(options, recipe)
    # The type arguments are the classes of the instances, so that all their fields become flags.
    generic: Any = WithRecipe
    parsed, _ = _parse(generic[type(options), type(recipe)], default, args, prog, description=summary)
    return parsed


def _parse(kind: Any, default: T, args: list[str], prog: str, **settings: Any) -> tuple[T, list[str]]:
    _check_types(default)
    _check_empty(args)
    marked: Any = tyro.conf.OmitArgPrefixes[tyro.conf.FlagCreatePairsOff[kind]]  # type: ignore[misc]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed = tyro.cli(marked, default=default, args=args, prog=prog, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_reason(errors.getvalue())}; see {prog} --help") from None
    values, unknown = parsed if settings.get("return_unknown_args") else (parsed, [])
    _check_paths(values)
    return values, unknown


def optional_value(
    convert: Callable[[str], Any], bare: Callable[[], Any], metavar: str
) -> PrimitiveConstructorSpec[Any]:
    """Return the tyro specification of a flag whose value may be left out; `bare()` is its value then.

    `convert` raises ValueError for an invalid value.
    """

    def from_arguments(values: list[str]) -> Any:
        if len(values) > 1:
            raise ValueError(f"expected at most one value, got {' '.join(values)!r}")
        return convert(values[0]) if values else bare()

    return PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar=metavar,
        instance_from_str=from_arguments,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def recipe_name(args: list[str]) -> tuple[str, list[str]]:
    """Return the recipe named by the first argument, or the default one, and the arguments after it."""
    if not args or args[0].startswith("-"):
        return next(iter(RECIPES)), args
    return check_recipe_name(args[0]), args[1:]


def check_recipe_name(name: str) -> str:
    """Return the complete name of a recipe; raise `UserError` if there is none."""
    if is_reference(name):
        return load_recipe(name)[0]
    if name not in RECIPES:
        known = [*RECIPES, name.replace(".py:", ".py::")] if ".py:" in name else list(RECIPES)
        raise UserError(
            f"no recipe {name!r}{nearest(name, known)}: choose one of {', '.join(RECIPES)}, or FILE.py::NAME"
        )
    return name


def run_folder_argument(args: list[str], usage: str) -> tuple[str, list[str]]:
    """Return the folder of a run, the first argument, and the arguments after it; "DIR" as the folder with --help."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if any(a in ("-h", "--help") for a in args):
        return "DIR", args
    raise UserError(f"a run folder is required: {usage}")


def _check_types(settings: Any) -> None:
    """Raise `UserError` for a default whose type differs from its field's, as a config.json may hold."""
    if wrong := type_errors(settings):
        raise UserError(f"{wrong[0]}: fix it")
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(value := getattr(settings, field.name)):
            _check_types(value)


def _check_empty(args: list[str]) -> None:
    """Raise `UserError` for a flag with an empty value, as of an unset variable of the shell."""
    for i, flag in enumerate(args):
        name, mark, given = flag.partition("=")
        if name.startswith("--") and ([given] if mark else args[i + 1 : i + 2]) == [""]:
            raise UserError(f"{name} is empty: give it a value, or leave it out")


def _check_paths(settings: Any) -> None:
    """Raise `UserError` for a path that the system rejects even for a lookup."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            _check_paths(value)
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


def _reason(panel: str) -> str:
    """Return in one line what tyro's error panel says, with the flags that it proposes."""
    reason = _first_paragraph(panel)
    if wrong := _NOT_A_NUMBER.fullmatch(reason):
        kind = "an integer" if "int()" in wrong[2] else "a number"
        return f"{wrong[1]} must be {kind}, got {wrong[3]}{_as_integer(wrong[3]) if 'int()' in wrong[2] else ''}"
    meant = sorted(set(_MEANT.findall(panel)))
    return f"{reason}, did you mean {' and '.join(meant)}" if meant else reason


def _as_integer(text: str) -> str:
    """Return the remedy for a number such as '1e3', which is an integer in another form."""
    with contextlib.suppress(ValueError, OverflowError):
        value = float(text.strip("'"))
        return f": use {int(value)}" if value == int(value) else ""
    return ""


def _first_paragraph(panel: str) -> str:
    """Return the body of tyro's error panel, between its title and its first rule, as one line."""
    # A value may contain line breaks (splitlines recognizes more of them than the panel) and dashes.
    _, *rows = [line.strip("│ ") for line in panel.split("\n")]
    rule = [len(row) > 8 and set(row) in ({"─"}, {"-"}, set("╰─╯")) for row in rows]
    begin = rule.index(False)
    return " ".join(rows[begin : rule.index(True, begin)] if True in rule[begin:] else rows[begin:]).rstrip(". ")
