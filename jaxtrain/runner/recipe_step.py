"""Build the training step of a recipe: its optimizer, learning rate schedule and loss scale."""

from collections.abc import Callable
from functools import cache, partial

import optax

from jaxtrain.errors import UserError
from jaxtrain.optim import (
    OPTIMIZERS,
    SCHEDULES,
    Call,
    Expression,
    build_expression,
    complete_expression,
    decay_mask,
    no_decay,
    parse_expression,
)
from jaxtrain.paths import Frozen, Matching, none_frozen, require_distinct_names
from jaxtrain.run import Recipe, Task, run_policy
from jaxtrain.runner.loss_scales import step_loss_scale
from jaxtrain.step import (
    TrainState,
    TrainStep,
    check_optimizer,
    option_names,
    train_step,
)


def training_step(recipe: Recipe, task: Task) -> TrainStep:
    """Build the training step of a recipe.

    Args:
      recipe: The settings of the run.
      task: Its task.

    Raises:
      UserError: A setting is invalid.
    """
    step = train_step(
        task.loss_fn,
        recipe_optimizer(recipe, task.no_decay or no_decay),
        **{
            **{name: getattr(recipe, name) for name in option_names() if hasattr(recipe, name)},
            # Settings of a run name these.
            "precision": run_policy(recipe),
            "frozen": frozen(recipe, task),
            "loss_scale": step_loss_scale(recipe, task),
        },
    )
    step.warns = False  # the run looks at every loss
    return step


def frozen(recipe: Recipe, task: Task) -> Frozen:
    """Return the predicate of the parameters that are not trained: those of the setting and those of the task."""
    of_task, of_recipe = task.frozen, none_frozen if recipe.frozen is None else Matching.of(recipe.frozen)
    if of_task is None:
        return of_recipe
    return of_task if of_recipe is none_frozen else lambda path: of_task(path) or of_recipe(path)


def state_shapes(step: TrainStep, task: Task, recipe: Recipe) -> TrainState:
    """Return the shapes of a recipe's state: nothing is allocated.

    Raises:
      UserError: Two arrays have one name in the files of a checkpoint.
    """
    initial = cache(task.create)  # params and model_state are of one trace
    shapes = step.shapes(lambda: initial().params, model_state=lambda: initial().model_state, seed=recipe.seed)
    require_distinct_names(shapes, "the state", in_files=True)
    return shapes


def schedule(recipe: Recipe) -> optax.Schedule:
    """Return the learning rate as a function of the update's number."""
    return build_expression(schedule_call(recipe), SCHEDULES, {})


def schedule_call(recipe: Recipe) -> Call:
    """Return the recipe's schedule as a call with all its arguments.

    Raises:
      UserError: The schedule is unknown.
    """
    lr, steps = recipe.lr, recipe.steps
    warmup = min(recipe.warmup_steps, steps - 1)
    rest = steps - warmup
    decaying = {"lr": lr, "warmup_steps": warmup}
    named = {
        "warmup-cosine": Call("warmup_cosine", {**decaying, "total_steps": steps, "final_lr": lr / 10}),
        # Decay over the last fifth, as Hägele et al. (2024) recommend.
        "wsd": Call("wsd", {**decaying, "stable_steps": rest - steps // 5, "decay_steps": steps // 5}),
        "onecycle": Call("one_cycle_lr", {"max_lr": lr, "total_steps": steps}),
        "linear": Call("wsd", {**decaying, "stable_steps": 0, "decay_steps": rest}),
        "constant": Call("wsd", {**decaying, "stable_steps": rest, "decay_steps": 0, "final_lr": lr}),
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
    """Return the recipe's optimizer as an expression, completed from the recipe's other settings.

    Raises:
      UserError: The recipe defines `make_optimizer`, or names no optimizer.
    """
    if defines_optimizer(recipe):
        raise UserError(
            f"{type(recipe).__name__} defines its optimizer in Python, which has no equivalent in PyTorch: use the "
            "setting optimizer instead of a method"
        )
    defaults = {"learning_rate": schedule_call(recipe), "b2": recipe.beta2, "weight_decay": recipe.weight_decay}
    return complete_expression(parse_expression(recipe.optimizer), OPTIMIZERS, defaults)


def defines_optimizer(recipe: Recipe) -> bool:
    """Whether the recipe has a `make_optimizer` in place of the setting `optimizer`."""
    return type(recipe).make_optimizer is not Recipe.make_optimizer


def recipe_optimizer(recipe: Recipe, exempt: Callable[[str], bool] = no_decay) -> optax.GradientTransformationExtraArgs:
    """Build the recipe's optimizer.

    Args:
      recipe: The settings of the run.
      exempt: Predicate on paths: whether a parameter does not decay, if the setting defines no groups and no mask.
    """
    if defines_optimizer(recipe):
        return optax.with_extra_args_support(_made(recipe))
    expression = optimizer_expression(recipe)
    # The parameters of a group have the weight decay that the group says.
    defaults = {"mask": partial(decay_mask, exempt)} if isinstance(expression, Call) else {}
    return build_expression(expression, OPTIMIZERS, defaults)


def _made(recipe: Recipe) -> optax.GradientTransformation:
    made = recipe.make_optimizer()
    if made is None:
        raise UserError(f"{type(recipe).__name__}.make_optimizer returned None: return an optax.GradientTransformation")
    check_optimizer(made)
    return made
