"""Loss scaling with the semantics of `torch.amp.GradScaler`, as an optax gradient transformation.

The arithmetic is that of `torch/amp/grad_scaler.py` and `aten/src/ATen/native/cuda/AmpKernels.cu`
(`_amp_update_scale_`): the scale doubles after `growth_interval` clean updates in a row, unless the doubled scale
would not be finite; it halves, and the count of clean updates starts again, on any inf or NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class LossScaleState(NamedTuple):
    """`scale` float32[]; `growth_tracker` int32[], clean updates in a row; `found_inf` bool[], of the last update;
    `skipped` int32[], updates found non-finite so far."""

    scale: jax.Array
    growth_tracker: jax.Array
    found_inf: jax.Array
    skipped: jax.Array


def dynamic_loss_scale(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> optax.GradientTransformation:
    """Unscales float32 gradients, says in its state whether any was inf or NaN, and moves the scale.

    The caller multiplies the loss by `current_scale(state)`, and skips the update where `state.found_inf` says so.

    >>> scaler = dynamic_loss_scale(init_scale=4.0, growth_interval=1)
    >>> state = scaler.init(None)
    >>> grads, state = scaler.update({"w": jnp.array([8.0])}, state)
    >>> float(grads["w"][0]), float(state.scale), bool(state.found_inf)
    (2.0, 8.0, False)
    >>> _, state = scaler.update({"w": jnp.array([jnp.inf])}, state)
    >>> float(state.scale), bool(state.found_inf)
    (4.0, True)
    """

    def init(params: Any) -> LossScaleState:
        del params
        zero = jnp.zeros([], np.int32)
        return LossScaleState(jnp.array(init_scale, np.float32), zero, jnp.array(False), jnp.copy(zero))

    def update(grads: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        del params
        found_inf = ~all_finite(grads)
        tracker = jnp.where(found_inf, 0, state.growth_tracker + 1)
        grow = tracker == growth_interval
        grown = _times(state.scale, growth_factor)
        grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
        scale = jnp.where(found_inf, _times(state.scale, backoff_factor), jnp.where(grow, grown, state.scale))
        new = LossScaleState(scale, jnp.where(grow, 0, tracker), found_inf, state.skipped + found_inf.astype(np.int32))
        inverse = 1 / state.scale
        return jax.tree.map(lambda g: g * inverse.astype(g.dtype), grads), new

    return optax.GradientTransformation(init, update)


def no_loss_scale() -> optax.GradientTransformation:
    """Does nothing and keeps nothing, as `GradScaler(enabled=False)`."""
    return optax.identity()


def current_scale(state: Any) -> jax.Array | float:
    """What the loss is multiplied by: 1.0 without scaling."""
    return state.scale if isinstance(state, LossScaleState) else 1.0


def found_inf(state: Any) -> jax.Array | bool:
    """Whether the last update was non-finite, and so is to be skipped: False without scaling."""
    return state.found_inf if isinstance(state, LossScaleState) else False


def skipped(state: Any) -> jax.Array | int:
    """How many updates were non-finite so far: 0 without scaling."""
    return state.skipped if isinstance(state, LossScaleState) else 0


def _times(scale: jax.Array, factor: float) -> jax.Array:
    """float32 by a double, rounded once, as PyTorch's kernel multiplies: 1.7 is no float32."""
    with jax.enable_x64(True):
        return (scale.astype(np.float64) * factor).astype(np.float32)


def all_finite(tree: Any) -> jax.Array:
    """bool[]: whether no leaf holds an inf or a NaN."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))
