"""The optimizer, the learning rate schedule and the loss scale of a recipe."""

from collections.abc import Callable
from typing import Any

import optax

from jaxtrain.errors import UserError
from jaxtrain.optim import (
    OPTIMIZERS,
    SCHEDULES,
    Call,
    Expression,
    all_but,
    build_expression,
    complete_expression,
    no_decay,
    parse_expression,
)
from jaxtrain.recipes import Recipe
from jaxtrain.step import LossFn, TrainStep, dynamic_loss_scale, static_loss_scale, train_step

SCALES: dict[str, Callable[..., optax.GradientTransformation]] = {
    "dynamic_loss_scale": dynamic_loss_scale,
    "static_loss_scale": static_loss_scale,
}


def training_step(recipe: Recipe, loss_fn: LossFn) -> TrainStep:
    """The step of a run of `recipe`. Raises `UserError` for settings that make none."""
    return train_step(
        loss_fn,
        optimizer(recipe),
        precision=recipe.precision,
        accumulate=recipe.accumulate,
        clip_norm=recipe.clip_norm,
        remat=recipe.remat,
        unroll=recipe.unroll,
        loss_scale=loss_scale(recipe),
        allow_recompile=recipe.allow_recompile,
    )


def schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate of the update numbered so."""
    return build_expression(schedule_call(recipe), SCHEDULES, {})


def schedule_call(recipe: Recipe) -> Call:
    """The recipe's schedule with all its arguments."""
    lr, steps = recipe.lr, recipe.steps
    warmup = min(recipe.warmup_steps, steps - 1)
    rest = steps - warmup
    falling = {"lr": lr, "warmup_steps": warmup}
    named = {
        "warmup-cosine": Call("warmup_cosine", {**falling, "total_steps": steps, "final_lr": lr / 10}),
        # A last fifth of decay, as Hägele et al. (2024) recommend.
        "wsd": Call("wsd", {**falling, "stable_steps": rest - steps // 5, "decay_steps": steps // 5}),
        "onecycle": Call("one_cycle_lr", {"max_lr": lr, "total_steps": steps}),
        "linear": Call("wsd", {**falling, "stable_steps": 0, "decay_steps": rest}),
        "constant": Call("wsd", {**falling, "stable_steps": rest, "decay_steps": 0, "final_lr": lr}),
    }
    if recipe.schedule in named:
        return named[recipe.schedule]
    call = parse_expression(recipe.schedule)
    if not isinstance(call, Call) or call.function not in SCHEDULES:
        raise UserError(
            f"schedule {recipe.schedule!r} is unknown: choose from {', '.join(named)}, or call one of "
            f"{', '.join(SCHEDULES)}"
        )
    return call


def optimizer_expression(recipe: Recipe) -> Expression:
    """The recipe's optimizer with what it leaves to the other settings."""
    left_out = {"learning_rate": schedule_call(recipe), "b2": recipe.beta2, "weight_decay": recipe.weight_decay}
    return complete_expression(parse_expression(recipe.optimizer), OPTIMIZERS, left_out)


def optimizer(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
    """The recipe's optimizer, which decays matrices but neither biases nor norms, unless it says otherwise."""
    return build_expression(optimizer_expression(recipe), OPTIMIZERS, {"mask": all_but(no_decay)})


def loss_scale(recipe: Recipe) -> Any:
    """The recipe's loss scale; None for that of its precision."""
    return None if recipe.loss_scale is None else build_expression(parse_expression(recipe.loss_scale), SCALES, {})
