"""A user's own case: `path/to/file.py::name`, of a case, a function that returns one, a recipe, or a function that
returns a PyTorch module and an example batch."""

import inspect
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.case import Case
from parity.cases.module import Factory, is_module_with_example, module_case


def own_case(spec: str, **options: Any) -> Case:
    """Return the `Case` of that name in a file, of the recipe of that name, or of a function called with `options`.

    A function that returns `(module, example batch)` is the case of that module, imported by `jaxtrain.from_torch`.

    Raises:
      UserError: There is no such file or name, or the function does not take an option.
    """
    from jaxtrain.errors import UserError

    path, name, module = _split(spec)
    found = getattr(module, name, None)
    if isinstance(found, Case) and options:
        raise UserError(f"{spec} has no {next(iter(options))}: define it as a function with that argument")
    if is_recipe(found):
        found = _recipe_case(spec, found, options)
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
    from parity.cases.recipe import recipe_case

    for option in options.keys() - kind.__dataclass_fields__.keys():
        raise UserError(f"{spec} has no {option}: leave it out, or add the field to the recipe")
    return recipe_case(kind(**options))
