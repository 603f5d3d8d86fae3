"""Checks of the fields of a task, where the user's line creates it."""

from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.step import accepts, signature_of

_ARGUMENTS = {
    "init": (),
    "load": ("like",),
    "digests": (),
    "evaluate": ("state", "batches"),
    "evaluate_answers": ("state", "is_whole"),
    "predict": ("params", "batch", "model_state"),
    "collate": ("examples",),
    "exported": ("params",),
    "save_pretrained": ("folder", "params"),
    "save_adapters": ("folder", "params"),
    "on_stored_base": ("params",),
    "sample": ("state", "seed"),
}


def check_fields(task: Any) -> None:
    """Check the functions of a task, and what its data are read by.

    Args:
      task: The task.

    Raises:
      UserError: A field is no function, takes other arguments, or has no valid value.
    """
    for name, arguments in _ARGUMENTS.items():
        value = getattr(task, name)
        if value is not None:
            _check_function(name, value, arguments)
    if isinstance(task.batch_keys, str):
        raise UserError(f"batch_keys must be a tuple of names, got {task.batch_keys!r}: use ({task.batch_keys!r},)")
    if task.eval_rows is not None and task.eval_rows < 1:
        raise UserError(f"eval_rows must be at least 1, got {task.eval_rows}: None evaluates all examples")


def _check_function(name: str, value: Any, arguments: tuple[str, ...]) -> None:
    if not callable(value):
        remedy = "lambda: params, for example" if name == "init" else f"def {name}({', '.join(arguments)})"
        raise UserError(f"Task.{name} must be a function, got {type(value).__name__}: use {remedy}")
    if accepts(value, len(arguments)):
        return
    if not arguments:
        raise UserError(
            f"Task.{name} must take no arguments, got {signature_of(value)}: create the key inside, as in "
            "jax.random.key(self.seed)"
        )
    raise UserError(f"Task.{name} must take ({', '.join(arguments)}), got {signature_of(value)}: change its parameters")
