"""The case of a user's recipe that also defines the PyTorch side."""

from dataclasses import replace
from typing import Any, cast

from jaxtrain.errors import UserError
from jaxtrain.run import Recipe, task_batches
from parity.case import Batch, Case
from parity.optimizer import AdamW

_METHODS = ("torch_model", "torch_loss")


def recipe_case(recipe: Recipe) -> Case:
    """Return the case that compares a recipe's loss with that of its PyTorch side.

    The recipe defines two methods besides `task`: `torch_model(self)` creates the PyTorch model, and
    `torch_loss(self, model, batch)` returns the sum of the losses and its weight. Both sides train with AdamW with the
    recipe's lr, weight_decay, beta2 and clip_norm, on batches of its training data. The task's `names` and `buffers`
    are the name tables; without them tables are proposed.

    Args:
      recipe: The recipe.

    Raises:
      UserError: A method is missing, or parameters are frozen.
    """
    kind: Any = type(recipe)
    for method in _METHODS:
        if not callable(getattr(kind, method, None)):
            raise UserError(
                f"{kind.__name__} has no PyTorch side: define the methods torch_model(self), which creates the model, "
                "and torch_loss(self, model, batch), which returns (sum of the losses, weight)"
            )
    if recipe.frozen is not None:
        raise UserError(f"frozen {recipe.frozen!r} has no counterpart in torch_model: compare with frozen=None")
    task, torch_side = recipe.task(), cast(Any, recipe)
    if task.frozen is not None:
        raise UserError("the frozen parameters of the task have no counterpart in torch_model: leave Task.frozen out")
    shapes = task.shapes()

    def batch(seed: int, rows: int) -> Batch:
        batches = task_batches(task, replace(recipe, batch_size=rows, seed=seed))
        try:
            return next(batches)
        finally:
            batches.close()

    return Case(
        name=kind.__name__,
        torch_model=torch_side.torch_model,
        torch_loss=torch_side.torch_loss,
        loss_fn=task.loss_fn,
        params_like=shapes.params,
        names=task.names,
        batch=batch,
        rows=recipe.batch_size,
        optimizer=AdamW(recipe.lr, betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay),
        clip_norm=recipe.clip_norm,
        state_like=shapes.model_state,
        buffers=task.buffers,
    )
