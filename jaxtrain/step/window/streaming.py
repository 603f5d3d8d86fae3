"""A window whose micro-batches arrive one by one: its gradient so far is part of the state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.program.internals import readable_equations
from jaxtrain.step.accumulate import Window, add_micro_batch, mean_gradient, micro_batch_count
from jaxtrain.step.checks.fitting_state import require_fitting
from jaxtrain.step.gradient import Gradient
from jaxtrain.step.initial_state import empty_window
from jaxtrain.step.parts import StepParts
from jaxtrain.step.state import TrainState, applied_updates, require_state
from jaxtrain.step.step import micro_gradient, update, window_step
from jaxtrain.step.update.float32_arithmetic import widen
from jaxtrain.step.update.learning_rate import used_learning_rate
from jaxtrain.step.update.update_metrics import Metrics, update_metrics, weighted_means

Close = Callable[[TrainState], tuple[TrainState, Metrics]]


@readable_equations()
def micro_step(parts: StepParts, state: TrainState, micro_batch: Any) -> tuple[TrainState, Metrics]:
    """Add a micro-batch [B, …] to the state's window, and apply the update if that completes it."""
    require_fitting(parts, state, micro_batch)
    window = _window(state)
    if parts.options.accumulate == 1:
        new, metrics = window_step(parts, state._replace(window=None), micro_batch)
        return new._replace(window=window), {**metrics, "updated": jnp.array(True)}
    k = (
        parts.options.accumulate(applied_updates(state))
        if callable(parts.options.accumulate)
        else parts.options.accumulate
    )
    gradient = micro_gradient(parts, state, micro_batch, k)
    window = add_micro_batch(window, gradient.grads, gradient.loss, k, gradient.observed)
    state = state._replace(micro_step=state.micro_step + 1, model_state=gradient.model_state, window=window)
    new, metrics = _close_if(micro_batch_count(window) >= k, parts, state)
    return new, {**metrics, **weighted_means(window.loss, gradient.metrics)}


@readable_equations()
def flush(parts: StepParts, state: TrainState) -> tuple[TrainState, Metrics]:
    """Apply the update of an incomplete window; leave the state as it is if the window is empty."""
    window = _window(state)
    new, metrics = _close_if(micro_batch_count(window) > 0, parts, state)
    return new, {**metrics, **weighted_means(window.loss, {})}


def _close_if(condition: Any, parts: StepParts, state: TrainState) -> tuple[TrainState, Metrics]:
    state = state._replace(ema=widen(state.ema))  # in case it was set to parameters in low precision

    def close(state: TrainState) -> tuple[TrainState, Metrics]:
        window = _window(state)
        grads, loss, nonfinite, observed = mean_gradient(window), window.loss, window.nonfinite, window.observed
        gradient = Gradient(grads, loss, {}, state.model_state, nonfinite, observed)
        new, metrics = update(parts, state, gradient)
        return new._replace(window=empty_window(parts, new)), {**metrics, "updated": jnp.array(True)}

    def leave_open(state: TrainState) -> tuple[TrainState, Metrics]:
        window = _window(state)
        metrics = update_metrics(
            state,
            state,
            grad_norm=jnp.zeros([], window.loss.total.dtype),
            skip=False,
            lr=used_learning_rate(state.opt_state),
            nonfinite=window.nonfinite,
        )
        return state, {**metrics, "updated": jnp.array(False)}

    new: tuple[TrainState, Metrics] = lax.platform_dependent(
        condition, state, cpu=partial(_branch, close, leave_open), default=partial(_select, close, leave_open)
    )
    return new


def _branch(yes: Close, no: Close, condition: jax.Array, state: TrainState) -> tuple[TrainState, Metrics]:
    return lax.cond(condition, yes, no, state)


def _select(yes: Close, no: Close, condition: jax.Array, state: TrainState) -> tuple[TrainState, Metrics]:
    """Compute both: on a GPU a branch would make the host wait for the device at every micro-batch."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes(state), no(state))


def _window(state: TrainState) -> Window:
    require_state(state)
    if state.window is None:
        raise UserError("the state has no window: create it with step.init(params, streaming=True)")
    return state.window
