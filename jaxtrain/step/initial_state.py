"""The state before the first update."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.paths import merge, partition
from jaxtrain.step.accumulate import Window, open_window
from jaxtrain.step.checks.batch import require_32_bits
from jaxtrain.step.checks.mistakes import describe
from jaxtrain.step.complex_parameters import as_real, refuse_complex
from jaxtrain.step.parts import StepParts
from jaxtrain.step.probes import zero_probes
from jaxtrain.step.state import TrainState, require_trainable
from jaxtrain.step.update.ema import init_ema
from jaxtrain.step.update.rounding import init_compensation


def init_state(
    parts: StepParts, params: Any, model_state: Any, seed: int, streaming: bool, *, donate: bool = False
) -> TrainState:
    """Return the state before the first update; with `donate` of the same arrays."""
    if not jnp.issubdtype(jnp.result_type(seed), np.integer):
        raise UserError(f"seed must be an integer, got {describe(seed)}: use 0, for example")
    require_trainable(params, parts.options.frozen)
    require_32_bits(params, "params")
    require_32_bits(model_state, "model_state")
    trained, frozen = partition(params, parts.options.frozen)
    if parts.options.clip_value is not None:
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
        ema=None if parts.options.ema is None else init_ema(trained),
        scales=policy.init_scales(params),
        compensation=init_compensation(policy.param_rounding, trained),
    )
    return state._replace(window=empty_window(parts, state)) if streaming else state


def empty_window(parts: StepParts, state: TrainState) -> Window:
    """Return a window without micro-batches."""
    trained, _ = partition(state.params, parts.options.frozen)
    return open_window(as_real(trained), zero_probes(parts.scales(state)))
