"""Calls of an optax transformation: with the arguments that it takes, or refused in one line.

The interface of optax lets a transformation ask for more than gradients, state and parameters, or accept no more, and
combinators pass what they are given to those inside: only a call tells. It happens while the step is traced.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name
from jaxtrain.step.checks.mistakes import describe_leaf, same_structure


def call_init(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Return the optimizer's state for `params`.

    Raises:
      UserError: It has none, such as that of `optax.lookahead`, which takes pairs of parameters.
    """
    try:
        return optimizer.init(params)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        if _is_of_library(error):
            raise UserError(
                f"the optimizer's init fails with these parameters, {_first_line(error)}: use an optimizer of "
                "jaxtrain.optim, or one of optax that is initialized with a pytree of arrays"
            ).with_traceback(error.__traceback__) from error
        raise


def call_update(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the optimizer's updates and its new state.

    Args:
      optimizer: An optax transformation.
      grads: Gradients.
      state: Its state.
      params: Parameters.
      extra: Arguments given to a transformation that takes them, such as `value`; each alone.

    Raises:
      UserError: It needs other arguments, or returns updates of other shapes than the parameters'.
    """
    takes_extra = isinstance(optimizer, optax.GradientTransformationExtraArgs | optax.MultiSteps)
    try:
        updates, new = _with_taken(optimizer, grads, state, params, extra if takes_extra else {})
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        if not _is_of_library(error):
            raise
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
        needs = f"needs {missing[1].replace(chr(39), '')}" if missing else f"fails, {_first_line(error)}"
        raise UserError(
            f"the optimizer's update {needs}: a step gives it gradients, state, parameters, metrics, and value, the "
            "mean loss; use an optimizer that takes no other arguments"
        ).with_traceback(error.__traceback__) from error
    _check_shapes(updates, params)
    return updates, new


def _with_taken(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Call the update with those of some arguments that it takes."""
    try:
        found: tuple[Any, Any] = optimizer.update(grads, state, params, **extra)
    except TypeError as error:
        other = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if other is None or other[1] not in extra:
            raise
        return _with_taken(optimizer, grads, state, params, {k: x for k, x in extra.items() if k != other[1]})
    return found


def _check_shapes(updates: Any, params: Any) -> None:
    if params is None:
        return
    if not same_structure(updates, params):
        raise UserError(
            "the optimizer returns updates of another structure than the parameters: use one that returns an update "
            "for each of them"
        )
    for (path, param), update in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(updates), strict=True
    ):
        if np.shape(update) != np.shape(param):
            raise UserError(
                f"the optimizer returns {describe_leaf(update)} for the parameter {path_name(path)}, which is "
                f"{describe_leaf(param)}: use one that takes the gradient of the mean loss, not those of examples"
            )


def _is_of_library(error: BaseException) -> bool:
    """Return whether an error was raised by optax, or by a call from it, rather than in a user's transformation."""
    last, traceback = "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        last = last if name in ("jax", "jaxlib", "numpy") else name
        traceback = traceback.tb_next
    return last in ("optax", "jaxtrain")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
