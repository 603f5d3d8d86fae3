"""The training step: scale, differentiate, accumulate, unscale, check, clip, update, rescale.

Pure functions of a state and a batch. They know nothing of models, files, hosts or logging: whatever a run must
remember is in `TrainState`. `train_step` (build.py) jits them, `streaming.py` processes the micro-batches of
a window one by one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.cpu.short_rows import as_vectors
from jaxtrain.errors import UserError
from jaxtrain.passes import Groups, Stages
from jaxtrain.passes.pipeline import AFTER_GRAD, AT_UPDATE, Rewrite, applied
from jaxtrain.paths import merge, partition
from jaxtrain.program.internals import readable_equations
from jaxtrain.step.accumulate import (
    Window,
    add_micro_batch,
    gradient_factor,
    mean_gradient,
    nonzero_weight,
    open_window,
    scaled_mean,
    split_batch,
)
from jaxtrain.step.arithmetic import widen
from jaxtrain.step.batch import require_32_bits, require_rows
from jaxtrain.step.clip import clip_grad_norm, clip_grad_value
from jaxtrain.step.complex_parameters import as_complex, as_real, refuse_complex
from jaxtrain.step.ema import init_ema, update_ema
from jaxtrain.step.fitting_state import require_fitting
from jaxtrain.step.learning_rate import used_learning_rate
from jaxtrain.step.loss_program import NO_COPIES, Copies
from jaxtrain.step.loss_scale import current_scale, found_inf
from jaxtrain.step.mistakes import describe
from jaxtrain.step.nonfinite import Nonfinite, locate_nonfinite
from jaxtrain.step.objective import Compute, Loss
from jaxtrain.step.partial_sums import add_last, divides_rows, with_sums, with_totals, zero_sums, zero_totals
from jaxtrain.step.parts import StepParts
from jaxtrain.step.per_layer_scale import scales_of_blocks
from jaxtrain.step.pipeline import Divided, pipelined_window
from jaxtrain.step.probes import NO_PROBES, Probes, observed_together, zero_probes
from jaxtrain.step.rounding import apply_updates, init_compensation
from jaxtrain.step.state import (
    TrainState,
    applied_updates,
    micro_batch_key,
    require_trainable,
    rounding_key,
)
from jaxtrain.step.window_loop import LONGEST, scan_window

Metrics = dict[str, jax.Array]
Step = Callable[..., tuple[TrainState, Metrics]]


class Gradient(NamedTuple):
    """The gradient of a micro-batch or of a window, and the results of the same forward pass.

    Attributes:
      grads: Gradient of the trained parameters, float32 or float64, multiplied by the loss scale.
      loss: Summed loss and weight.
      metrics: The loss_fn's metrics, summed like the loss.
      model_state: Model state after the forward pass.
      nonfinite: Location of the first inf or NaN; None if it has not been looked for.
      observed: What the passes have observed, the maximum over micro-batches.
    """

    grads: Any
    loss: Loss
    metrics: dict[str, Loss]
    model_state: Any
    nonfinite: Nonfinite | None = None
    observed: Probes = NO_PROBES


def init_state(
    parts: StepParts, params: Any, model_state: Any, seed: int, streaming: bool, *, donate: bool = False
) -> TrainState:
    """Return the state before the first update; with `donate` of the same arrays."""
    if not jnp.issubdtype(jnp.result_type(seed), np.integer):
        raise UserError(f"seed must be an integer, got {describe(seed)}: use 0, for example")
    require_trainable(params, parts.frozen)
    require_32_bits(params, "params")
    require_32_bits(model_state, "model_state")
    trained, frozen = partition(params, parts.frozen)
    if parts.clip_value is not None:
        refuse_complex(trained, "clip_value, as PyTorch's clip_grad_value_,", "use clip_norm")
    policy, copy = parts.loss.policy, not donate
    trained, frozen = policy.cast_params(trained, copy=copy), policy.cast_frozen(frozen, copy=copy)
    params = merge(trained, frozen)
    zero = jnp.zeros([], np.int32)
    state = TrainState(
        step=zero,
        micro_step=jnp.copy(zero),
        params=params,
        model_state=policy.cast_params(model_state, copy=copy),
        # Copies: an optimizer that stores the initial parameters shares their buffers, and both are donated.
        opt_state=jax.tree.map(jnp.copy, parts.optimizer.init(trained)),
        loss_scale=parts.scaler.init(trained),
        rng=jax.random.key(seed),
        window=None,
        ema=None if parts.ema is None else init_ema(trained),
        scales=policy.init_scales(params),
        compensation=init_compensation(policy.param_rounding, trained),
    )
    return state._replace(window=empty_window(parts, state)) if streaming else state


@readable_equations()
def batch_step(parts: StepParts, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    """Apply one update computed from an effective batch [k·B, …]."""
    require_rows(batch)
    return window_step(parts, state, batch if callable(parts.accumulate) else split_batch(batch, parts.accumulate))


def window_step(parts: StepParts, state: TrainState, micro_batches: Any) -> tuple[TrainState, Metrics]:
    """Apply one update computed from the micro-batches of a window [k, B, …]; [B, …] where k is 1."""
    require_fitting(parts, state, micro_batches)
    if callable(parts.accumulate):
        raise UserError("accumulate is a schedule: pass its micro-batches one by one to step.micro")
    if state.window is not None:
        raise UserError("the state streams micro-batches: pass them to step.micro, or use init without streaming")
    gradient = window_gradient(parts, state, micro_batches, parts.accumulate)
    state, metrics = update(parts, state, gradient)
    state = state._replace(micro_step=state.micro_step + parts.accumulate)
    return state, {**metrics, **weighted_means(gradient.loss, gradient.metrics)}


def micro_gradient(
    parts: StepParts,
    state: TrainState,
    micro_batch: Any,
    k: Any,
    *,
    in_loop: bool = False,
    copies: Copies = NO_COPIES,
    window: Window | None = None,
) -> Gradient:
    """Scale and differentiate the loss of one of a window's k micro-batches.

    Args:
      parts: The parts of the step.
      state: The state.
      micro_batch: The micro-batch.
      k: Micro-batches of the window.
      in_loop: Whether the window's loop calls it, which adds the gradients of groups of rows at its end.
      copies: What `parts.loss.copies` returned for the parameters.
      window: The window so far, if this is its last micro-batch, with which its gradients are added over groups: the
        gradient then is of `zero_totals`.
    """
    scales = parts.scales(state)

    def compute_with(probes: Probes) -> Compute:
        has_none = all(x is None for x in copies) and not jax.tree.leaves(probes)
        return parts.compute_loss if has_none else parts.loss.compute(copies, scales, probes)

    trained, frozen = partition(state.params, parts.frozen)
    rng = micro_batch_key(state.rng, state.micro_step)
    scale = current_scale(state.loss_scale)
    groups = parts.loss.groups if in_loop or window is not None else None
    if groups is not None:
        refuse_complex(trained, "accumulation on a mesh", "use accumulate=1, or store torch.view_as_real of it")

    def join(variables: Any) -> Any:
        return merge(as_complex(variables, trained), frozen)

    variables = as_real(trained)
    if groups is not None and window is None:
        join, variables = partial(with_sums, state.params), zero_sums(trained, groups)
    elif groups is not None and window is not None:
        # Of another forward pass, of which the compiler leaves only what computes the weight, usually from the batch.
        weight = compute_with(zero_probes(scales))(state.params, micro_batch, rng, state.model_state)[0].weight
        join = partial(with_totals, state.params, window=window, factor=gradient_factor(weight, k), groups=groups)
        variables = zero_totals(window, groups)

    def scaled_loss(variables_and_probes: tuple[Any, Probes]) -> tuple[jax.Array, Any]:
        variables, probes = variables_and_probes
        params = join(variables)
        loss, metrics, model_state = compute_with(probes)(params, micro_batch, rng, state.model_state)
        return scaled_mean(loss, k, scale), (loss, metrics, model_state)

    passes = parts.loss.of_gradient(in_loop=in_loop)
    differentiate = applied(AFTER_GRAD, passes, jax.grad(scaled_loss, has_aux=True))
    (grads, observed), (loss, metrics, model_state) = differentiate((variables, zero_probes(scales)))
    return Gradient(widen(grads), loss, metrics, model_state, observed=observed)


def window_gradient(parts: StepParts, state: TrainState, micro_batches: Any, k: int) -> Gradient:
    """Accumulate the gradients of a window's micro-batches, in order."""
    if parts.loss.stages is not None:
        return _pipelined_gradient(parts, state, micro_batches, k, parts.loss.stages)
    first = micro_batches if k == 1 else jax.tree.map(lambda x: x[0], micro_batches)
    rest = first, micro_batch_key(state.rng, state.micro_step), state.model_state
    copies = parts.loss.copies(parts.scales(state).products, state.params, *rest)
    if k == 1:
        return micro_gradient(parts, state, micro_batches, k, copies=copies)

    def add(carry: tuple[Window, Any], i_and_micro_batch: tuple[jax.Array, Any]) -> tuple[tuple[Window, Any], Any]:
        (window, model_state), (i, micro_batch) = carry, i_and_micro_batch
        at_i = state._replace(micro_step=state.micro_step + i, model_state=model_state)
        gradient = micro_gradient(parts, at_i, micro_batch, k, in_loop=True, copies=copies)
        window = add_micro_batch(window, gradient.grads, gradient.loss, k, gradient.observed)
        return (window, gradient.model_state), gradient.metrics

    numbered = (jnp.arange(k, dtype=np.int32), micro_batches)
    trained, _ = partition(state.params, parts.frozen)
    groups = parts.loss.groups
    start_scales = parts.scales(state)
    window = open_window(as_real(trained) if groups is None else zero_sums(trained, groups), zero_probes(start_scales))
    pipelines_layers = parts.loss.is_on_mesh and parts.loss.platform == "gpu" and k <= LONGEST
    start = window, state.model_state
    # In a block with a scale of its own, the backward pass cannot add the sums of earlier micro-batches.
    scales_blocks = start_scales.blocks is not None
    if pipelines_layers and groups is not None and groups.scatters and not scales_blocks:
        (window, model_state), metrics = scan_window(add, start, numbered, k - 1, pipelines_layers=True)
        at_last = state._replace(micro_step=state.micro_step + (k - 1), model_state=model_state)
        micro_batch = jax.tree.map(lambda x: x[k - 1], micro_batches)
        # Otherwise the compiler may run the forward pass before the loop, during which its activations stay in memory.
        micro_batch, _ = lax.optimization_barrier((micro_batch, window.loss))
        last = micro_gradient(parts, at_last, micro_batch, k, copies=copies, window=window)
        grads, loss, nonfinite = add_last(window, last.grads, last.loss)
        metrics = jax.tree.map(lambda x, y: x.sum(0) + y, metrics, last.metrics)
        observed = observed_together(window.observed, last.observed)
        return Gradient(grads, loss, metrics, last.model_state, nonfinite, observed)
    (window, model_state), metrics = scan_window(add, start, numbered, k, pipelines_layers=pipelines_layers)
    metrics = jax.tree.map(lambda x: x.sum(0), metrics)
    grads = mean_gradient(window)
    grads = grads if groups is None else groups.add(grads)
    return Gradient(grads, window.loss, metrics, model_state, window.nonfinite, window.observed)


def _pipelined_gradient(parts: StepParts, state: TrainState, micro_batches: Any, k: int, stages: Stages) -> Gradient:
    """Accumulate the gradients of a window's micro-batches in a pipeline."""
    if state.model_state is not None:
        raise UserError("the mesh axis pipeline does not support model state, such as BatchNorm's: use data or fsdp")
    trained, frozen = partition(state.params, parts.frozen)
    refuse_complex(trained, "the mesh axis pipeline", "use data or fsdp")
    groups, of_head = (parts.loss.groups, parts.loss.of_head) if k > 1 else (None, None)

    def computed(compute_loss: Compute, groups: Groups | None) -> Callable[..., Any]:
        def compute(variables: Any, fixed: Any, micro_batch: Any, rng: jax.Array) -> tuple[Loss, dict[str, Loss]]:
            params = merge(variables, fixed) if groups is None else with_sums(fixed, variables)
            loss, metrics, _ = compute_loss(params, micro_batch, rng, None)
            return loss, metrics

        return compute

    variables, fixed = (trained, frozen) if groups is None else (zero_sums(trained, groups), state.params)
    divided = None
    if of_head is not None and divides_rows(micro_batches, of_head.groups.size):
        compute_loss = parts.loss._replace(constrain=of_head.constrain, groups=of_head.groups).compute()
        divided = Divided(computed(compute_loss, of_head.groups), zero_sums(trained, of_head.groups), state.params)
    window = jax.tree.map(lambda x: x[None], micro_batches) if k == 1 else micro_batches
    keys = jax.vmap(partial(micro_batch_key, state.rng))(state.micro_step + jnp.arange(k, dtype=np.int32))
    compute, scale = computed(parts.compute_loss, groups), current_scale(state.loss_scale)
    found = pipelined_window(compute, variables, fixed, window, keys, scale, stages, divided)
    grads = found.grads if groups is None else groups.add(found.grads)
    return Gradient(grads, found.loss, found.metrics, None, found.nonfinite)


def update(parts: StepParts, state: TrainState, gradient: Gradient) -> tuple[TrainState, Metrics]:
    """Unscale, check, clip, update, rescale."""
    passes: dict[str, Rewrite] = {}
    if not parts.loss.is_on_mesh:  # where a vector is not divided as the array is
        zero = jnp.minimum(state.step, 0)  # of a number that is never negative
        passes["as_vectors"] = partial(as_vectors, zero=zero, platform=parts.loss.platform)
    found: tuple[TrainState, Metrics] = applied(AT_UPDATE, passes, partial(_update, parts))(state, gradient)
    return found


def _update(parts: StepParts, state: TrainState, gradient: Gradient) -> tuple[TrainState, Metrics]:
    of_blocks = {} if gradient.observed.blocks is None else {"observed": gradient.observed.blocks}
    grads, loss_scale = parts.scaler.update(gradient.grads, state.loss_scale, **of_blocks)  # unscales, checks, rescales
    skip = found_inf(loss_scale)
    nonfinite = gradient.nonfinite
    if nonfinite is None:
        nonfinite = locate_nonfinite(gradient.grads, 0, norm_of=grads)

    grads, grad_norm = clip_grad_norm(grads, parts.clip_norm)
    grads = clip_grad_value(grads, parts.clip_value)

    trained, frozen = partition(state.params, parts.frozen)
    grads = as_complex(grads, trained)
    mean_loss = gradient.loss.total / nonzero_weight(gradient.loss.weight)
    updates, opt_state = parts.optimizer.update(grads, state.opt_state, trained, value=mean_loss)
    lr = used_learning_rate(opt_state)
    key = rounding_key(state.rng, state.step)
    rounding = parts.loss.policy.param_rounding
    new_trained, compensation = apply_updates(rounding, trained, updates, state.compensation, key)
    old_ema = ema = state.ema
    if parts.ema is not None:
        old_ema = widen(partition(state.ema, parts.frozen)[0])  # in case it was set to all parameters
        ema = update_ema(old_ema, new_trained, parts.ema, is_first=applied_updates(state) == 0)

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


def empty_window(parts: StepParts, state: TrainState) -> Window:
    """Return a window without micro-batches."""
    trained, _ = partition(state.params, parts.frozen)
    return open_window(as_real(trained), zero_probes(parts.scales(state)))


def update_metrics(
    old: TrainState,
    new: TrainState,
    *,
    grad_norm: jax.Array,
    skip: jax.Array | bool,
    lr: jax.Array | None,
    nonfinite: Nonfinite,
) -> Metrics:
    """Return the metrics of one update, from the states before and after it."""
    of_blocks = scales_of_blocks(old.loss_scale, new.loss_scale)
    return {
        **({} if lr is None else {"lr": lr}),
        "grad_norm": grad_norm,
        "loss_scale": jnp.asarray(current_scale(old.loss_scale), np.float32),
        **({} if of_blocks is None else {"loss_scales": of_blocks}),
        "skipped": jnp.asarray(skip),
        "applied": applied_updates(new),
        "attempted": new.step,
        "nonfinite_micro_batch": nonfinite.micro_batch,
        "nonfinite_leaf": nonfinite.leaf,
    }


def weighted_means(loss: Loss, metrics: dict[str, Loss]) -> Metrics:
    """Return the weight, and the means of the loss and of the loss_fn's metrics, from their sums."""
    sums = {"loss": loss, **metrics}
    return {"weight": loss.weight, **{name: s.total / nonzero_weight(s.weight) for name, s in sums.items()}}


def _restore_if(skip: jax.Array | bool, old: Any, new: Any) -> Any:
    """Return `old` for a skipped update. Selected rather than added to zero, so that not even a -0.0 changes."""
    return new if skip is False else jax.tree.map(lambda o, n: jnp.where(skip, o, n), old, new)
