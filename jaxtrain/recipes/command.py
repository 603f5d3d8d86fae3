"""Format a recipe as a command."""

import dataclasses
import shlex

from jaxtrain.recipes.recipe import Recipe
from jaxtrain.recipes.registry import RECIPES


def command(verb: str, name: str, recipe: Recipe) -> str:
    """Return the command `jaxtrain VERB NAME` with the flags in which `recipe` differs from the named recipe.

    Args:
      verb: A command that takes a recipe, "train" or "plan".
      name: Name of a built-in recipe.
      recipe: A recipe of the same class.

    Returns:
      The command, quoted for a shell.

    Example:
      >>> command("train", "digits-mlp", dataclasses.replace(RECIPES["digits-mlp"], accumulate=4, unroll=True))
      'jaxtrain train digits-mlp --accumulate 4 --unroll'
      >>> command("plan", "digits-mlp", dataclasses.replace(RECIPES["digits-mlp"], optimizer="sgd(momentum=0.9)"))
      "jaxtrain plan digits-mlp --optimizer 'sgd(momentum=0.9)'"
    """
    flags: list[str] = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if value != getattr(RECIPES[name], field.name):
            flags.append(f"--{field.name.replace('_', '-')}")
            flags += [] if value is True else [str(value)]
    return shlex.join(["jaxtrain", verb, name, *flags])
