"""The loss scale of a recipe, from its expression."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax

from jaxtrain.errors import UserError
from jaxtrain.labs.loss_scales import per_layer_loss_scale, require_blocks
from jaxtrain.optim import Call, build_expression, clipped, parse_expression
from jaxtrain.passes import count_blocks
from jaxtrain.run import Recipe, Task, abstract_batch
from jaxtrain.step import dynamic_loss_scale, static_loss_scale, validated

SCALES: dict[str, Callable[..., optax.GradientTransformation]] = {
    "dynamic_loss_scale": dynamic_loss_scale,
    "per_layer_loss_scale": per_layer_loss_scale,
    "static_loss_scale": static_loss_scale,
}


def loss_scale(recipe: Recipe) -> Any:
    """Build the recipe's loss scale, of one block if the expression does not say of how many; None for the default."""
    return _built(recipe, lambda given: 1 if given is None else given)


def step_loss_scale(recipe: Recipe, task: Task) -> Any:
    """Build the loss scale of a recipe's step, of as many blocks as the task's model has; None for the default.

    Raises:
      UserError: The model has no marked blocks, or not as many as the expression says.
    """

    def blocks(given: int | None) -> int:
        found = _blocks(recipe, task)
        require_blocks(found if given is None else given, found)
        return found

    return _built(recipe, blocks)


def _built(recipe: Recipe, blocks: Callable[[int | None], int]) -> Any:
    if recipe.loss_scale is None:
        return None
    return _of_expression(parse_expression(recipe.loss_scale), blocks)


def _of_expression(expression: Any, blocks: Callable[[int | None], int]) -> Any:
    if isinstance(expression, Call) and expression.function == "clipped":  # gradients that are scaled
        bounds = dict(expression.arguments)
        if not isinstance(scale := bounds.pop("optimizer", None), Call):
            example = "clipped(optimizer=dynamic_loss_scale())"
            raise UserError(f"{expression} clips nothing: give it a scale, as in {example}")
        clip = partial(clipped, _of_expression(scale, blocks))
        return build_expression(Call("clipped", bounds), {"clipped": clip}, {})
    if isinstance(expression, Call) and expression.function == "per_layer_loss_scale":
        given = expression.arguments.get("blocks")
        expression = replace(expression, arguments={**expression.arguments, "blocks": blocks(given)})
    return build_expression(expression, SCALES, {})


def _blocks(recipe: Recipe, task: Task) -> int:
    """Count the marked blocks of the model of a task."""
    initial = jax.eval_shape(task.create)
    compute = validated(task.loss_fn, differentiable=True)
    key = jax.eval_shape(lambda: jax.random.key(recipe.seed))
    batch = abstract_batch(recipe, task)
    return count_blocks(compute, initial.params, batch, key, initial.model_state)
