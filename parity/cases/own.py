"""A user's own case: `path/to/file.py::name`, of a case, a function that returns one, a recipe, or a function that
returns a PyTorch module and an example batch."""

import ast
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.case import Case
from parity.cases.module import Factory, is_module_with_example, module_case


def own_case(spec: str, flags: Sequence[str] = (), **options: Any) -> Case:
    """Return the `Case` of that name in a file, of the recipe of that name, or of a function called with `options`.

    A function that returns `(module, example batch)` is the case of that module, imported by `jaxtrain.from_torch`.

    Args:
      spec: `path/to/file.py::name`.
      flags: Flags that set fields of the recipe, as `["--width", "8"]`.
      **options: Arguments of the function, or fields of the recipe.

    Raises:
      UserError: There is no such file or name, or the function does not take an option.
    """
    from jaxtrain.errors import UserError

    path, name, module = _split(spec)
    found = getattr(module, name, None)
    if flags and not is_recipe(found):
        raise UserError(f"unrecognized arguments: {' '.join(flags)}")
    if isinstance(found, Case) and options:
        raise UserError(f"{spec} has no {next(iter(options))}: define it as a function with that argument")
    if is_recipe(found):
        found = _recipe_case(spec, found, {**_parsed(spec, found, flags), **options})
    elif callable(found):
        for option in options.keys() - inspect.signature(found).parameters.keys():
            raise UserError(f"{spec} has no {option}: leave it out, or add the argument to the function")
        function = partial(found, **options)
        found = function()
        if is_module_with_example(found):
            return module_case(name, function)
    if not isinstance(found, Case):
        cases = [key for key, value in vars(module).items() if isinstance(value, Case)]
        there = f"its cases are {', '.join(cases)}" if cases else "it has no parity.Case"
        raise UserError(f"{name!r} in {path} is not a case: {there}")
    return found


def own_factory(spec: str) -> Factory:
    """Return the function of that name in a file, which returns a module and an example batch.

    Raises:
      UserError: There is no such file or name, or it returns something else.
    """
    from jaxtrain.errors import UserError

    path, name, module = _split(spec)
    found = getattr(module, name, None)
    if not callable(found) or is_recipe(found) or not is_module_with_example(found()):
        raise UserError(f"{name!r} in {path} returns no module: name a function that returns (module, example batch)")
    factory: Factory = found
    return factory


def _split(spec: str) -> tuple[str, str, ModuleType]:
    """Return the path, the name and the imported file of `path/to/file.py::name`."""
    from jaxtrain.errors import UserError
    from jaxtrain.user_file import import_file

    path, _, name = spec.rpartition("::")
    if not Path(path).is_file():
        raise UserError(f"there is no file {path!r}: name a case as path/to/file.py::case")
    return path, name, import_file(Path(path))


def is_recipe(found: Any) -> bool:
    """Whether `found` is a subclass of `jaxtrain.Recipe`."""
    # What defines a recipe has imported it; other cases run without its dependencies.
    run = sys.modules.get("jaxtrain.run")
    return run is not None and inspect.isclass(found) and issubclass(found, run.Recipe)


def _recipe_case(spec: str, kind: Any, options: dict[str, Any]) -> Case:
    from jaxtrain.errors import UserError
    from parity.cases.recipe_case import recipe_case

    for option in options.keys() - kind.__dataclass_fields__.keys():
        raise UserError(f"{spec} has no {option}: leave it out, or add the field to the recipe")
    if missing := [name for name in _required(kind) if name not in options]:
        raise UserError(
            f"{spec} needs {', '.join(missing)}: give each a default, or set it, as in --{missing[0]} VALUE"
        )
    return recipe_case(kind(**options))


def _parsed(spec: str, kind: Any, flags: Sequence[str]) -> dict[str, Any]:
    """Return the fields that flags set, `--name value` or `--name=value`, by name."""
    from jaxtrain.errors import UserError

    found, left = {}, [part for flag in flags for part in _split_flag(flag)]
    while left:
        flag, *left = left
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in kind.__dataclass_fields__:
            raise UserError(f"unrecognized argument {flag}: {spec} has no such field, and parity no such flag")
        if not left or left[0].startswith("--"):
            raise UserError(f"{flag} needs a value: write {flag}=VALUE")
        text, *left = left
        found[name] = _value(kind, name, text)
    return found


def _split_flag(flag: str) -> list[str]:
    name, equals, value = flag.partition("=")
    return [name, value] if equals and flag.startswith("--") else [flag]


def _value(kind: Any, name: str, text: str) -> Any:
    """Return the text as a number, a boolean or None if the field takes one, else as it is."""
    from jaxtrain.errors import UserError
    from jaxtrain.fields import type_errors

    values: list[Any] = [text]
    with suppress(ValueError, SyntaxError):
        values.insert(0, ast.literal_eval(text.title() if text in ("true", "false", "none") else text))
    others = dict.fromkeys(_required(kind))
    for value in values:
        faults = type_errors(kind(**{**others, name: value}))
        wrong = [fault for fault in faults if fault.startswith(f"{name} must be")]
        if not wrong:
            return value
    raise UserError(f"{wrong[0]}: change --{name}")


def _required(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
