"""Format a recipe as a command."""

import dataclasses
import shlex

from jaxtrain.recipes.registry import named_recipe
from jaxtrain.run import Recipe


def command(verb: str, name: str, recipe: Recipe) -> str:
    """Return the command `jaxtrain VERB NAME` with the flags in which `recipe` differs from the named recipe.

    Args:
      verb: A command that takes a recipe, "train" or "plan".
      name: Name of a built-in recipe, or FILE.py::NAME.
      recipe: A recipe of the same class.

    Returns:
      The command, quoted for a shell.

    Example:
      >>> command("train", "digits-mlp", dataclasses.replace(named_recipe("digits-mlp"), accumulate=4, unroll=True))
      'jaxtrain train digits-mlp --accumulate 4 --unroll'
      >>> command("plan", "digits-mlp", dataclasses.replace(named_recipe("digits-mlp"), optimizer="sgd(momentum=0.9)"))
      "jaxtrain plan digits-mlp --optimizer 'sgd(momentum=0.9)'"
    """
    flags: list[str] = []
    default = named_recipe(name)
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if value != getattr(default, field.name):
            flags.append(f"--{field.name.replace('_', '-')}")
            flags += [] if value is True else map(str, value) if isinstance(value, tuple) else [str(value)]
    return shlex.join(["jaxtrain", verb, name, *flags])
