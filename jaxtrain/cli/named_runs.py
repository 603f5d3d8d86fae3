"""The arguments that name a recipe or a run, before the flags of a command."""

from jaxtrain.cli import nearest
from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES
from jaxtrain.run import is_reference, load_recipe


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
