"""What was wrong with the arguments of a call that failed."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from jaxtrain.errors import UserError, is_out_of_memory, with_user_frames
from jaxtrain.step.checks.fitting_state import optimizer_state_error
from jaxtrain.step.checks.mistakes import alias_error, batch_error, device_error, is_deleted, tracing_error
from jaxtrain.step.parts import StepParts
from jaxtrain.step.state import DONATED, require_state

_F = TypeVar("_F", bound=Callable[..., Any])


def takes_one_batch(call: _F) -> _F:
    """Raise `UserError` if a function of a state and a batch is called with other arguments."""
    is_method = "self" in inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise with_user_frames(error)  # noqa: B904
            given = [f"{len(args) - is_method} positional arguments", *(f"{name}=" for name in kwargs)]
            raise UserError(
                f"a step takes a state and one batch, got {' and '.join(given)}: "
                "pass all arrays of the batch in one pytree, as in step(state, {'x': x, 'y': y})"
            ) from None
        except Exception as error:
            raise with_user_frames(error)  # noqa: B904

    return cast(_F, checked)


def diagnosed(error: Exception, state: Any, batch: Any, parts: StepParts | None = None) -> Exception:
    """Return the error to raise for one that a step raised: a `UserError` if its arguments are wrong, else itself."""
    if not isinstance(error, UserError) and not is_out_of_memory(error):
        message = _argument_error(state, batch, parts) or tracing_error(error)
        if message:
            error = UserError(message).with_traceback(error.__traceback__)
    return with_user_frames(error)


def _argument_error(state: Any, batch: Any, parts: StepParts | None) -> str | None:
    try:
        require_state(state, batch)
    except UserError as wrong:
        return str(wrong)
    if any(map(is_deleted, jax.tree.leaves(state))):
        return DONATED
    return (
        batch_error(batch)
        or device_error(state, batch)
        or alias_error(state, batch)
        or (optimizer_state_error(parts, state) if parts else None)
    )
