"""The argument that names a recipe, before flags that are those of the recipe."""

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
