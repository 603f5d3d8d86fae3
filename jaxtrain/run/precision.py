"""The precision of a run."""

from dataclasses import replace

from jaxtrain.errors import UserError
from jaxtrain.passes import Policy, policy
from jaxtrain.paths import Matching
from jaxtrain.run.recipe import Recipe


def run_policy(recipe: Recipe) -> Policy:
    """Return the precision policy of a recipe.

    Args:
      recipe: The settings of the run.

    Raises:
      UserError: A pattern of `fp8_exclude` is empty, or it is given without an fp8 precision.

    Example:
      >>> run_policy(Recipe(precision="fp8", fp8_exclude="head/*, wte/*")).fp8.exclude
      ('head/*', 'wte/*')
    """
    chosen = policy(recipe.precision)
    if recipe.fp8_exclude is None:
        return chosen
    if chosen.fp8 is None:
        raise UserError(
            f"fp8_exclude {recipe.fp8_exclude!r} has no effect in {recipe.precision}: use it with --precision fp8"
        )
    patterns = Matching.of(recipe.fp8_exclude).patterns
    if not all(patterns):
        raise UserError(
            f"fp8_exclude {recipe.fp8_exclude!r} has an empty pattern: use patterns such as 'head/*', or leave it out"
        )
    return replace(chosen, fp8=replace(chosen.fp8, exclude=patterns))
