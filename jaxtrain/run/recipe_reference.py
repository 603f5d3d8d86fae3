"""References to a user's recipe, FILE.py::NAME."""

import dataclasses
import inspect
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.run.recipe import Recipe
from jaxtrain.user_file import import_file, imported_source

_MARK = "::"


def is_reference(name: str) -> bool:
    """Whether a name has the form FILE.py::NAME, or FILE.py."""
    return _MARK in name or name.endswith(".py")


def load_recipe(reference: str) -> tuple[str, Recipe]:
    """Import the file of a reference and create its recipe with default settings.

    Args:
      reference: "FILE.py::NAME" of a subclass of `Recipe`, or "FILE.py" if the file defines only one.

    Returns:
      A tuple (the complete reference, the recipe).

    Raises:
      UserError: The file does not exist, or defines no such recipe, or a field has no default.
    """
    path, name = split_reference(reference)
    if not path.is_file():
        raise UserError(f"{path} does not exist: give FILE.py::NAME of a subclass of jaxtrain.Recipe")
    module = import_file(path)
    defined = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Recipe) and value.__module__ == module.__name__
    }
    if not name and len(defined) == 1:
        name = next(iter(defined))
    if not name and defined:
        raise UserError(
            f"{path} defines the recipes {', '.join(defined)}: name one of them, as in {path}{_MARK}{[*defined][-1]}"
        )
    if name not in defined:
        found = f"{', '.join(defined)} is defined" if defined else "no subclass of jaxtrain.Recipe is defined"
        raise UserError(f"{path} defines no recipe {name or _MARK + 'NAME'!r}, {found} there: use FILE.py::NAME")
    return f"{path}{_MARK}{name}", _create(defined[name], f"{path}{_MARK}{name}")


def reference_to(kind: type[Recipe]) -> str:
    """Return FILE.py::NAME of a class; its name alone if it was defined in no file, as in a notebook."""
    try:
        file = inspect.getfile(kind)
    except (OSError, TypeError):
        return kind.__qualname__
    if not Path(file).is_file() or "<locals>" in kind.__qualname__:
        return kind.__qualname__
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}{_MARK}{kind.__qualname__}"


def split_reference(reference: str) -> tuple[Path, str]:
    """Return the file and the name of a reference; the name is empty if it has none."""
    path, _, name = reference.partition(_MARK)
    return Path(path), name


def file_of(reference: str) -> Path:
    """Return the file of a reference."""
    return split_reference(reference)[0]


def name_of(reference: str) -> str:
    """Return the name of a recipe's class; empty if the reference has none."""
    return split_reference(reference)[1]


def locate(reference: str, file: str) -> str:
    """Return a recorded reference as it can be used now.

    Args:
      reference: The reference, relative to the folder in which it was recorded.
      file: Absolute path of its file at that time.

    Returns:
      The reference itself if it leads to that file from here, else one with the absolute path.

    Example:
      >>> locate("my_run.py::MyRun", "/home/me/my_run.py")
      '/home/me/my_run.py::MyRun'
    """
    path, name = split_reference(reference)
    return reference if path.resolve() == Path(file) else f"{file}{_MARK}{name}"


def source_of(reference: str) -> bytes:
    """Return the content of the file of a reference, as it was imported if it was."""
    return imported_source(file_of(reference))


def _create(kind: type[Recipe], reference: str) -> Recipe:
    if not kind.__dict__.get("__dataclass_fields__"):
        raise UserError(f"{reference} is not a dataclass: decorate it with @dataclass(frozen=True, kw_only=True)")
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if required:
        raise UserError(f"{reference} has fields without defaults ({', '.join(required)}): give each a default")
    return kind()
