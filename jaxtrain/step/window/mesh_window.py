"""The gradient of a window on a mesh: the sums of each group of rows, added once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.passes import Groups
from jaxtrain.paths import partition
from jaxtrain.step.accumulate import Window, gradient_factor, mean_gradient, open_window
from jaxtrain.step.complex_parameters import refuse_complex
from jaxtrain.step.gradient import Gradient, Variables
from jaxtrain.step.loss_program import Copies
from jaxtrain.step.parts import StepParts
from jaxtrain.step.probes import observed_together, zero_probes
from jaxtrain.step.state import TrainState, micro_batch_key
from jaxtrain.step.step import adding, copies_for_window, micro_gradient, trained_variables
from jaxtrain.step.window.partial_sums import add_last, with_sums, with_totals, zero_sums, zero_totals
from jaxtrain.step.window.window_loop import LONGEST, scan_window


def mesh_gradient(parts: StepParts, state: TrainState, micro_batches: Any, k: int) -> Gradient:
    """Accumulate the gradients of a window's micro-batches, in order, and add those of the groups once."""
    copies = copies_for_window(parts, state, micro_batches, k)
    if k == 1:
        return micro_gradient(parts, state, micro_batches, k, copies=copies)
    groups = parts.loss.groups
    variables = trained_variables if groups is None else partial(_sums, groups=groups)
    add = adding(parts, state, k, copies, variables)
    numbered = (jnp.arange(k, dtype=np.int32), micro_batches)
    scales = parts.scales(state)
    start = open_window(variables(parts, state).values, zero_probes(scales)), state.model_state
    pipelines_layers = parts.loss.platform == "gpu" and k <= LONGEST
    # Between gradients that a pass scales, the backward pass cannot add the sums of earlier micro-batches.
    if pipelines_layers and groups is not None and groups.scatters and scales.scaler is None:
        (window, model_state), metrics = scan_window(add, start, numbered, k - 1, pipelines_layers=True)
        at_last = state._replace(micro_step=state.micro_step + (k - 1), model_state=model_state)
        last = _last_gradient(
            parts, at_last, jax.tree.map(lambda x: x[k - 1], micro_batches), k, copies, window, groups
        )
        grads, loss, nonfinite = add_last(window, last.grads, last.loss)
        metrics = jax.tree.map(lambda x, y: x.sum(0) + y, metrics, last.metrics)
        observed = observed_together(window.observed, last.observed)
        return Gradient(grads, loss, metrics, last.model_state, nonfinite, observed)
    (window, model_state), metrics = scan_window(add, start, numbered, k, pipelines_layers=pipelines_layers)
    metrics = jax.tree.map(lambda x: x.sum(0), metrics)
    grads = mean_gradient(window)
    grads = grads if groups is None else groups.add(grads)
    return Gradient(grads, window.loss, metrics, model_state, window.nonfinite, window.observed)


def _sums(parts: StepParts, state: TrainState, groups: Groups) -> Variables:
    """Return zeros whose gradients are the sums of each group."""
    trained, _ = partition(state.params, parts.options.frozen)
    refuse_complex(trained, "accumulation on a mesh", "use accumulate=1, or store torch.view_as_real of it")
    return Variables(zero_sums(trained, groups), partial(with_sums, state.params, groups=groups))


def _last_gradient(
    parts: StepParts, state: TrainState, micro_batch: Any, k: int, copies: Copies, window: Window, groups: Groups
) -> Gradient:
    """Differentiate the loss of a window's last micro-batch, with which the gradients are added over groups.

    Returns:
      The gradient by `zero_totals`.
    """
    # Otherwise the compiler may run the forward pass before the loop, during which its activations stay in memory.
    micro_batch, _ = lax.optimization_barrier((micro_batch, window.loss))

    def totals(parts: StepParts, state: TrainState) -> Variables:
        scales, rng = parts.scales(state), micro_batch_key(state.rng, state.micro_step)
        # A second forward pass, for the weight only: dead code elimination removes the rest.
        compute = parts.compute(copies, scales, zero_probes(scales))
        weight = compute(state.params, micro_batch, rng, state.model_state)[0].weight
        join = partial(with_totals, state.params, window=window, factor=gradient_factor(weight, k), groups=groups)
        return Variables(zero_totals(window, groups), join)

    return micro_gradient(parts, state, micro_batch, k, variables=totals, copies=copies)
