"""The training step: scale, differentiate, accumulate, unscale, check, clip, update, rescale.

Pure functions of a state and a batch. They know nothing of models, files, hosts or logging: whatever a run must
remember is in `TrainState`. `train_step` (build.py) jits them. `window/` has the other ways to compute the gradient of
a window: on a mesh, micro-batch by micro-batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.cpu.short_rows import as_vectors
from jaxtrain.errors import UserError
from jaxtrain.passes.pipeline import AFTER_GRAD, AT_UPDATE, Rewrite, applied
from jaxtrain.paths import merge, partition
from jaxtrain.program.internals import readable_equations
from jaxtrain.step.accumulate import Window, add_micro_batch, mean_gradient, scaled_mean, split_batch
from jaxtrain.step.checks.batch import require_rows
from jaxtrain.step.checks.fitting_state import require_fitting
from jaxtrain.step.complex_parameters import as_complex, as_real
from jaxtrain.step.gradient import Gradient, Variables
from jaxtrain.step.initial_state import empty_window
from jaxtrain.step.loss_program import NO_COPIES, Copies
from jaxtrain.step.loss_scale import current_scale, found_inf
from jaxtrain.step.nonfinite import locate_nonfinite
from jaxtrain.step.parts import StepParts
from jaxtrain.step.probes import Probes, zero_probes
from jaxtrain.step.state import TrainState, applied_updates, micro_batch_key, rounding_key
from jaxtrain.step.update.clip import clip_grad_norm, clip_grad_value
from jaxtrain.step.update.ema import update_ema
from jaxtrain.step.update.float32_arithmetic import widen
from jaxtrain.step.update.learning_rate import used_learning_rate
from jaxtrain.step.update.rounding import apply_updates
from jaxtrain.step.update.update_metrics import Metrics, update_metrics, weighted_means

Step = Callable[..., tuple[TrainState, Metrics]]
OfState = Callable[[StepParts, TrainState], Variables]
"""Returns what a gradient is by."""


@readable_equations()
def batch_step(parts: StepParts, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    """Apply one update computed from an effective batch [k·B, …]."""
    require_rows(batch)
    return window_step(
        parts, state, batch if callable(parts.options.accumulate) else split_batch(batch, parts.options.accumulate)
    )


def window_step(parts: StepParts, state: TrainState, micro_batches: Any) -> tuple[TrainState, Metrics]:
    """Apply one update computed from the micro-batches of a window [k, B, …]; [B, …] where k is 1."""
    require_fitting(parts, state, micro_batches)
    if callable(parts.options.accumulate):
        raise UserError("accumulate is a schedule: pass its micro-batches one by one to step.micro")
    if state.window is not None:
        raise UserError("the state streams micro-batches: pass them to step.micro, or use init without streaming")
    of_window = parts.window or window_gradient
    gradient = of_window(parts, state, micro_batches, parts.options.accumulate)
    state, metrics = update(parts, state, gradient)
    state = state._replace(micro_step=state.micro_step + parts.options.accumulate)
    return state, {**metrics, **weighted_means(gradient.loss, gradient.metrics)}


def trained_variables(parts: StepParts, state: TrainState) -> Variables:
    """Return the trained parameters, complex ones as pairs of real numbers."""
    trained, frozen = partition(state.params, parts.options.frozen)
    return Variables(as_real(trained), lambda values: merge(as_complex(values, trained), frozen))


def micro_gradient(
    parts: StepParts,
    state: TrainState,
    micro_batch: Any,
    k: Any,
    *,
    variables: OfState = trained_variables,
    in_loop: bool = False,
    copies: Copies = NO_COPIES,
) -> Gradient:
    """Scale and differentiate the loss of one of a window's k micro-batches.

    Args:
      parts: The parts of the step.
      state: The state.
      micro_batch: The micro-batch.
      k: Micro-batches of the window.
      variables: Returns what the gradient is by.
      in_loop: Whether the window's loop calls it.
      copies: What `parts.loss.copies` returned for the parameters.
    """
    scales, rng = parts.scales(state), micro_batch_key(state.rng, state.micro_step)
    scale = current_scale(state.loss_scale)
    values, join = variables(parts, state)

    def scaled_loss(values_and_probes: tuple[Any, Probes]) -> tuple[jax.Array, Any]:
        values, probes = values_and_probes
        compute = parts.compute(copies, scales, probes)
        loss, metrics, model_state = compute(join(values), micro_batch, rng, state.model_state)
        return scaled_mean(loss, k, scale), (loss, metrics, model_state)

    passes = parts.loss.of_gradient(in_loop=in_loop)
    differentiate = applied(AFTER_GRAD, passes, jax.grad(scaled_loss, has_aux=True))
    (grads, observed), (loss, metrics, model_state) = differentiate((values, zero_probes(scales)))
    return Gradient(widen(grads), loss, metrics, model_state, observed=observed)


def window_gradient(parts: StepParts, state: TrainState, micro_batches: Any, k: int) -> Gradient:
    """Accumulate the gradients of a window's micro-batches, in order."""
    copies = copies_for_window(parts, state, micro_batches, k)
    if k == 1:
        return micro_gradient(parts, state, micro_batches, k, copies=copies)

    add = adding(parts, state, k, copies, trained_variables)
    start = empty_window(parts, state), state.model_state
    (window, model_state), metrics = lax.scan(add, start, (jnp.arange(k, dtype=np.int32), micro_batches))
    metrics = jax.tree.map(lambda x: x.sum(0), metrics)
    return Gradient(mean_gradient(window), window.loss, metrics, model_state, window.nonfinite, window.observed)


def adding(parts: StepParts, state: TrainState, k: int, copies: Copies, variables: OfState) -> Callable[..., Any]:
    """Return the body of the loop over a window: it adds the gradient of a micro-batch, by `variables`."""

    def add(carry: tuple[Window, Any], i_and_micro_batch: tuple[jax.Array, Any]) -> tuple[tuple[Window, Any], Any]:
        (window, model_state), (i, micro_batch) = carry, i_and_micro_batch
        at_i = state._replace(micro_step=state.micro_step + i, model_state=model_state)
        gradient = micro_gradient(parts, at_i, micro_batch, k, variables=variables, in_loop=True, copies=copies)
        window = add_micro_batch(window, gradient.grads, gradient.loss, k, gradient.observed)
        return (window, gradient.model_state), gradient.metrics

    return add


def copies_for_window(parts: StepParts, state: TrainState, micro_batches: Any, k: int) -> Copies:
    """Return copies of the parameters for a window, for the shapes of its first micro-batch."""
    first = micro_batches if k == 1 else jax.tree.map(lambda x: x[0], micro_batches)
    rest = first, micro_batch_key(state.rng, state.micro_step), state.model_state
    return parts.loss.copies(parts.scales(state).products, state.params, *rest)


def update(parts: StepParts, state: TrainState, gradient: Gradient) -> tuple[TrainState, Metrics]:
    """Unscale, check, clip, update, rescale."""
    passes: dict[str, Rewrite] = {}
    if not parts.loss.is_on_mesh:  # where a vector is not divided as the array is
        zero = jnp.minimum(state.step, 0)  # of a number that is never negative
        passes["as_vectors"] = partial(as_vectors, zero=zero, platform=parts.loss.platform)
    found: tuple[TrainState, Metrics] = applied(AT_UPDATE, passes, partial(_update, parts))(state, gradient)
    return found


def _update(parts: StepParts, state: TrainState, gradient: Gradient) -> tuple[TrainState, Metrics]:
    observed = {} if gradient.observed.scaler is None else {"observed": gradient.observed.scaler}
    grads, loss_scale = parts.scaler.update(gradient.grads, state.loss_scale, **observed)  # unscales, checks, rescales
    skip = found_inf(loss_scale)
    grads, grad_norm = clip_grad_norm(grads, parts.options.clip_norm)
    grads = clip_grad_value(grads, parts.options.clip_value)
    nonfinite = gradient.nonfinite
    if nonfinite is None:
        nonfinite = locate_nonfinite(gradient.grads, 0, grad_norm)

    trained, frozen = partition(state.params, parts.options.frozen)
    grads = as_complex(grads, trained)
    means = weighted_means(gradient.loss, gradient.metrics)
    given = {"value": means["loss"], "metrics": means}
    updates, opt_state = parts.optimizer.update(grads, state.opt_state, trained, **given)
    lr = used_learning_rate(opt_state)
    key = rounding_key(state.rng, state.step)
    rounding = parts.loss.policy.param_rounding
    new_trained, compensation = apply_updates(rounding, trained, updates, state.compensation, key)
    old_ema = ema = state.ema
    if parts.options.ema is not None:
        old_ema = widen(partition(state.ema, parts.options.frozen)[0])  # in case it was set to all parameters
        ema = update_ema(old_ema, new_trained, parts.options.ema, is_first=applied_updates(state) == 0)

    before = trained, state.opt_state, old_ema, state.compensation
    new_trained, opt_state, ema, compensation = _restore_if(skip, before, (new_trained, opt_state, ema, compensation))
    new = state._replace(
        step=state.step + 1,
        params=merge(new_trained, frozen),
        model_state=gradient.model_state,
        opt_state=opt_state,
        loss_scale=loss_scale,
        ema=ema,
        scales=parts.loss.policy.next_scales(state.scales, gradient.observed.products),
        compensation=compensation,
    )
    return new, update_metrics(state, new, grad_norm=grad_norm, skip=skip, lr=lr, nonfinite=nonfinite)


def _restore_if(skip: jax.Array | bool, old: Any, new: Any) -> Any:
    """Return `old` for a skipped update. Selected rather than added to zero, so that not even a -0.0 changes."""
    return new if skip is False else jax.tree.map(lambda o, n: jnp.where(skip, o, n), old, new)
