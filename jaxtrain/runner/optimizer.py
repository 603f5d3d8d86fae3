"""The optimizer and the learning-rate schedule of a recipe."""

from typing import Any

import jax
import optax

from jaxtrain.optim import adamw
from jaxtrain.recipes import Recipe


def schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate after so many applied updates: from 0 up to `lr`, then by a cosine to a tenth of it."""
    warmup = min(recipe.warmup_steps, recipe.steps - 1)
    return optax.warmup_cosine_decay_schedule(
        0.0 if warmup else recipe.lr, recipe.lr, warmup, recipe.steps, recipe.lr / 10
    )


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW, decaying matrices but neither biases nor norms."""
    return adamw(schedule(recipe), b2=recipe.beta2, weight_decay=recipe.weight_decay, mask=_matrices)


def _matrices(params: Any) -> Any:
    def decayed(path: Any, leaf: Any) -> bool:
        del leaf
        return getattr(path[-1], "key", None) not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decayed, params)
