"""Whether a state is one of a step: it has what the options of the step need, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.paths import partition
from jaxtrain.step.mistakes import same_structure
from jaxtrain.step.parts import StepParts
from jaxtrain.step.state import TrainState, require_state


def require_fitting(parts: StepParts, state: Any, batch: Any = None) -> None:
    """Raise `UserError` for a state of a step with other options, which this one would misread."""
    require_state(state, batch)
    trained, _ = partition(state.params, parts.frozen)
    expected = jax.eval_shape(parts.scaler.init, trained)
    if not same_structure(expected, state.loss_scale):
        has, expects = (_loss_scale_name(tree) for tree in (state.loss_scale, expected))
        raise UserError(
            f"the state has {has}, but this step expects {expects}: create it with this step's init(params), "
            "or give both steps the same precision and loss_scale"
        )
    _require_scales(parts, state)
    if (state.ema is None) != (parts.ema is None):
        has = "no moving average" if state.ema is None else "a moving average"
        raise UserError(
            f"the state has {has} of the parameters, but this step has ema={parts.ema}: create it with this step's "
            f"init(params), or use state._replace(ema={'state.params' if state.ema is None else None})"
        )
    rounding = parts.loss.policy.param_rounding
    if (state.compensation is None) != (rounding != "kahan"):
        has = "no compensation" if state.compensation is None else "a compensation"
        raise UserError(
            f"the state has {has} of its parameters' rounding, but this step has param_rounding {rounding!r}: create "
            "it with this step's init(params), or give both steps the same precision"
        )


def _require_scales(parts: StepParts, state: TrainState) -> None:
    expected = jax.eval_shape(parts.loss.policy.init_scales, state.params)
    if jax.tree.map(jnp.shape, expected) != jax.tree.map(jnp.shape, state.scales):
        has = "no scales" if state.scales is None else "other scales"
        remedy = "create it with this step's init(params)"
        if expected is None:
            has, remedy = "scales", f"{remedy}, or use state._replace(scales=None)"
        expects = "none" if expected is None else "those of delayed scaling"
        raise UserError(f"the state has {has} of products in 8 bits, but this step expects {expects}: {remedy}")


def _loss_scale_name(loss_scale: Any) -> str:
    return f"a loss scale ({type(loss_scale).__name__})" if jax.tree.leaves(loss_scale) else "no loss scale"
