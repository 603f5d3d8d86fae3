"""Whether a state is one of a step: it has what the options of the step need, and nothing else.

Structures, shapes and dtypes are compared while the step is traced, so that calls cost nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.paths import partition, path_name
from jaxtrain.step.checks.mistakes import difference, same_structure
from jaxtrain.step.complex_parameters import as_real
from jaxtrain.step.parts import StepParts
from jaxtrain.step.state import TrainState, require_state


def require_fitting(parts: StepParts, state: Any, batch: Any = None) -> None:
    """Raise `UserError` for a state of a step with other options, which this one would misread."""
    require_state(state, batch)
    trained, _ = partition(state.params, parts.options.frozen)
    _require_dtype(parts, trained)
    if error := optimizer_state_error(parts, state):
        raise UserError(error)
    expected = jax.eval_shape(parts.scaler.init, trained)
    if not same_structure(expected, state.loss_scale):
        has, expects = (_loss_scale_name(tree) for tree in (state.loss_scale, expected))
        raise UserError(
            f"the state has {has}, but this step expects {expects}: create it with this step's init(params), "
            "or give both steps the same precision and loss_scale"
        )
    _require_scales(parts, state)
    if (state.ema is None) != (parts.options.ema is None):
        has = "no moving average" if state.ema is None else "a moving average"
        raise UserError(
            f"the state has {has} of the parameters, but this step has ema={parts.options.ema}: create it with this "
            f"step's init(params), or use state._replace(ema={'state.params' if state.ema is None else None})"
        )
    if state.ema is not None and (found := _shape_difference(partition(state.ema, parts.options.frozen)[0], trained)):
        raise UserError(
            f"the state does not fit this step: its ema {found}; create it with this step's init(params), or use "
            "state._replace(ema=state.params)"
        )
    summed = jax.eval_shape(as_real, trained)
    if state.window is not None and (found := _shape_difference(state.window.sums.acc_grads, summed)):
        raise UserError(
            f"the state does not fit this step: its window {found}; flush it with the step that has filled it, then "
            "create it with this step's init(params, streaming=True)"
        )
    rounding = parts.loss.policy.param_rounding
    if (state.compensation is None) != (rounding != "kahan"):
        has = "no compensation" if state.compensation is None else "a compensation"
        raise UserError(
            f"the state has {has} of its parameters' rounding, but this step has param_rounding {rounding!r}: create "
            "it with this step's init(params), or give both steps the same precision"
        )


def optimizer_state_error(parts: StepParts, state: TrainState) -> str | None:
    """Return how the optimizer's state differs from that of the step's optimizer with these parameters, or None."""
    try:
        expected = jax.eval_shape(
            lambda params: parts.optimizer.init(partition(params, parts.options.frozen)[0]), state.params
        )
    except Exception:
        return None  # The optimizer fails with these parameters; its own error says why.
    if found := difference(state.opt_state, expected):
        return (
            f"the state does not fit this step and its params: its opt_state {found}; "
            "create it with this step's init(params)"
        )
    return None


def _require_dtype(parts: StepParts, trained: Any) -> None:
    expected = jnp.dtype(parts.loss.policy.param_dtype)
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != expected:
            raise UserError(
                f"the state does not fit this step: its parameter {path_name(path)} is {leaf.dtype}, but this step's "
                f"precision has {expected} parameters; create it with this step's init(params), or give both steps "
                "the same precision"
            )


def _shape_difference(tree: Any, like: Any) -> str | None:
    """Return the first difference in structure or shape, whatever the dtypes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), (tree, like))
    return difference(*shapes)


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
    if not jax.tree.leaves(loss_scale):
        return "no loss scale"
    has_blocks = getattr(loss_scale, "blocks", None) is not None
    return "loss scales by layer" if has_blocks else f"a loss scale ({type(loss_scale).__name__})"
