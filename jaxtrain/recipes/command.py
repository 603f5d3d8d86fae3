"""A recipe as the command that trains it."""

import dataclasses
import shlex

from jaxtrain.recipes.recipe import Recipe
from jaxtrain.recipes.registry import RECIPES


def command(verb: str, name: str, recipe: Recipe) -> str:
    """`jaxtrain VERB NAME` with the flags that make `recipe` of the one of that name.

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
