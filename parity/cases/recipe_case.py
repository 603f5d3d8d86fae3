"""The case of a user's recipe that also defines the PyTorch side."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.interop import MOMENTS, leaves
from jaxtrain.optim import Call, Expression, decay_mask, no_decay
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.run import Recipe, Task, task_batches
from jaxtrain.runner import defines_optimizer, frozen, optimizer_expression, recipe_optimizer
from parity.case import Batch, Case
from parity.optimizer import AdamW, Optimizer
from parity.sides.frozen import frozen_too, without_frozen
from parity.sides.torch_optimizers import has_counterpart, torch_optimizer, torch_scheduler

_METHODS = {
    "torch_model": "(self), which creates the model",
    "torch_loss": "(self, model, batch), which returns (sum of the losses, weight)",
}
STEPS = 20
"""Updates of a check, or those of the whole run if it is shorter."""
CHECKED = ("precision",)
"""Settings that a check is given, by `parity run --precision`."""
NAMED = (
    *("fp8_exclude", "mesh", "gradient_sums", "reshard_after", "pipeline_chunks", "unroll", "ema", "loss_scale"),
    *("deterministic", "max_skips", "spike_factor", "on_spike", "patience"),
)
"""Settings of a recipe that change its program or its course and that no check uses: named if they are set."""
WITHOUT_EFFECT = (
    *("workers", "log_every", "eval_every", "histograms", "watch_precision", "save_every", "keep_last", "keep_best"),
    *("keep_every", "allow_recompile", "stall_seconds"),
)
"""Settings that change no number of a training step."""


def recipe_case(recipe: Recipe) -> Case:
    """Return the case that compares a recipe's training with that of its PyTorch side.

    The recipe defines two methods besides `task`: `torch_model(self)` creates the PyTorch model, and
    `torch_loss(self, model, batch)` returns the sum of the losses and its weight. The model of a task of `from_torch`
    is known, so that `torch_model` may be left out.

    JAX's side trains with the recipe's optimizer, schedule, clipping, accumulation and frozen parameters, PyTorch's
    with their counterparts, on batches of the task's training data. A recipe with a `make_optimizer` defines its
    counterpart as `torch_optimizer(self, params)`, from pairs (name, parameter), and `torch_scheduler(self,
    optimizer)`, if it has a schedule. What has no counterpart is in `Case.not_exercised`. The task's `names` and
    `buffers` are the name tables; without them tables are proposed.

    Args:
      recipe: The recipe.

    Raises:
      UserError: A method is missing, or parameters are frozen on one side only.
    """
    kind, task = type(recipe), recipe.task()
    known: Any = getattr(task.imported, "to_torch", None)
    missing = [method for method in _METHODS if not (hasattr(kind, method) or (known and method == "torch_model"))]
    if missing:
        methods = "the methods" if len(missing) > 1 else "the method"
        define = " and ".join(f"{method}{_METHODS[method]}" for method in missing)
        raise UserError(f"{kind.__name__} has no PyTorch side: define {methods} {define}")
    torch_model = getattr(recipe, "torch_model", known)
    is_frozen = frozen(recipe, task)
    if known is None:
        _check_frozen(recipe, is_frozen, torch_model)
    shapes = task.shapes()
    side = _optimizer(recipe, task, shapes.params)

    def batch(seed: int, rows: int) -> Batch:
        batches = task_batches(task, replace(recipe, batch_size=rows, seed=seed))
        try:
            return {name: _in_torch(x) for name, x in next(batches).items()}
        finally:
            batches.close()

    return Case(
        name=kind.__name__,
        torch_model=torch_model,
        torch_loss=cast(Any, recipe).torch_loss,
        loss_fn=without_frozen(task.loss_fn, is_frozen),
        params_like=shapes.params,
        names=task.names,
        batch=batch,
        rows=recipe.batch_size,
        optimizer=frozen_too(side.optimizer, is_frozen),
        clip_norm=recipe.clip_norm,
        state_like=shapes.model_state,
        buffers=task.buffers,
        settings={
            "accumulate": recipe.accumulate,
            "remat": recipe.remat,
            "steps": min(STEPS, recipe.steps),
            "seed": recipe.seed,
        },
        updates=recipe.steps,
        precision=recipe.precision,
        not_exercised=(*side.not_exercised, *_set(recipe), "the initial parameters: both sides start from PyTorch's"),
    )


@dataclass(frozen=True)
class _Side:
    """The optimizer of both sides, and what of the recipe's own it leaves out."""

    optimizer: AdamW | Optimizer
    not_exercised: tuple[str, ...] = ()


def _optimizer(recipe: Recipe, task: Task, params_like: Any) -> _Side:
    kind: Any = recipe
    exempt = task.no_decay or no_decay
    if callable(getattr(kind, "torch_optimizer", None)):
        ours = recipe_optimizer(recipe, exempt)
        scheduler = getattr(kind, "torch_scheduler", None)
        return _Side(Optimizer("torch_optimizer", kind.torch_optimizer, ours, scheduler=scheduler))
    substitute = AdamW(recipe.lr, betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay)
    instead = f"both sides train with AdamW with lr {recipe.lr:g}, weight_decay {recipe.weight_decay:g} and no schedule"
    if defines_optimizer(recipe):
        remedy = "define torch_optimizer(self, params)"
        return _Side(substitute, (f"make_optimizer: {instead}; {remedy}",))
    expression = optimizer_expression(recipe)
    if not has_counterpart(expression):
        lines = (f"optimizer {recipe.optimizer}, schedule {recipe.schedule}: {instead}",)
        return _Side(substitute, lines)
    return _Side(_of_expression(expression, recipe_optimizer(recipe, exempt), exempt, params_like))


def _of_expression(expression: Expression, ours: Any, exempt: Callable[[str], bool], params_like: Any) -> Optimizer:
    first = expression if isinstance(expression, Call) else next(iter(expression.values()))
    rate = first.arguments.get("learning_rate")
    # By the arrays of JAX: a rule may ask for their axes, of which PyTorch's parameters of a layer have one less.
    kept = frozenset(path for path, decays in leaves(decay_mask(exempt, params_like)) if not decays)
    return Optimizer(
        name=first.function,
        torch=partial(torch_optimizer, expression, kept.__contains__),
        jax=ours,
        moments=moments_of(expression, ours, params_like),
        scheduler=torch_scheduler(rate) if isinstance(rate, Call) else None,
        by_path=True,
    )


def moments_of(expression: Expression, ours: optax.GradientTransformation, params_like: Any) -> dict[str, str]:
    """Return PyTorch's names of the moments that have the shapes of the parameters, of one group."""
    while isinstance(expression, Call) and expression.function in ("clamped", "clipped"):
        expression = expression.arguments["optimizer"]
    # Those of Rprop and Adafactor start from other numbers than zero, also those of frozen parameters.
    if not isinstance(expression, Call) or expression.function in ("adafactor", "rprop"):
        return {}
    state = jax.eval_shape(ours.init, params_like)
    return {theirs: name for name, theirs in MOMENTS[expression.function].items() if _has(state, name)}


def _has(state: Any, name: str) -> bool:
    found = optax.tree.get_all_with_path(state, name)
    return len(found) == 1 and found[0][1] is not None


def _check_frozen(recipe: Recipe, is_frozen: Frozen, torch_model: Callable[[], Any]) -> None:
    if is_frozen is none_frozen or not all(p.requires_grad for p in torch_model().parameters()):
        return
    what = "the task" if recipe.frozen is None else f"frozen {recipe.frozen!r}"
    raise UserError(f"{what} freezes parameters and torch_model none: set their requires_grad to False there too")


def _set(recipe: Recipe) -> list[str]:
    """Return a line for each setting of `NAMED` that the recipe sets."""
    defaults = {field.name: field.default for field in fields(Recipe)}
    set_ = {name: getattr(recipe, name) for name in NAMED if getattr(recipe, name) != defaults[name]}
    return [f"{name} {value}" for name, value in set_.items()]


def _in_torch(x: np.ndarray) -> np.ndarray:
    """Return integers in PyTorch's dtype: JAX's data have 32 bits."""
    return x.astype(np.int64) if x.dtype in (np.int32, np.uint32) else x
