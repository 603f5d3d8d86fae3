"""`jaxtrain new FILE.py`: write a recipe to edit."""

import inspect
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxtrain.cli.named_recipe import check_recipe_name
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse
from jaxtrain.recipes import RECIPES, starter
from jaxtrain.run import is_reference


@dataclass(frozen=True)
class New:
    """Write the file of a recipe to edit: a small complete run, or a copy of a built-in recipe."""

    from_: Annotated[str | None, Flag(name="from", metavar="RECIPE")] = None
    """The built-in recipe to copy."""


def main(args: list[str]) -> int:
    """Parse, write, print the next command."""
    usage = "jaxtrain new FILE.py [--from RECIPE]"
    if any(a in ("-h", "--help") for a in args):
        args = ["FILE.py", "--help"]
    if not args or args[0].startswith("-"):
        raise UserError(f"a file is required: {usage}")
    path, options = Path(args[0]), parse(New(), args[1:], "jaxtrain new FILE.py")
    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file: {usage}")
    kind: type = starter.Spirals
    if options.from_ is not None:
        if is_reference(options.from_):
            raise UserError(f"--from {options.from_} is a file already: copy it, or use one of {', '.join(RECIPES)}")
        kind = type(RECIPES[check_recipe_name(options.from_)])
    module = inspect.getmodule(kind)
    assert module is not None
    try:
        with path.open("x") as file:
            file.write(inspect.getsource(module))
    except FileExistsError:
        raise UserError(f"{path} already exists: choose another name") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another place") from error
    print(f"wrote {path}: edit it, then")
    print(shlex.join(["jaxtrain", "train", f"{path}::{kind.__name__}"]))
    return 0
