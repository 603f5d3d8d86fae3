"""Loss scaling with the semantics of `torch.amp.GradScaler`, as an optax gradient transformation.

The arithmetic is that of `torch/amp/grad_scaler.py` and `aten/src/ATen/native/cuda/AmpKernels.cu`
(`_amp_update_scale_`): the scale doubles after `growth_interval` clean updates in a row, unless the doubled scale
would not be finite; it halves, and the count of clean updates starts again, on any inf or NaN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.step.nonfinite import all_finite


class LossScaleState(NamedTuple):
    """`scale` float32[]; `growth_tracker` int32[], clean updates in a row; `found_inf` bool[], of the last update;
    `skipped` int32[], updates found non-finite so far; `consecutive` int32[], those of them in a row until now."""

    scale: jax.Array
    growth_tracker: jax.Array
    found_inf: jax.Array
    skipped: jax.Array
    consecutive: jax.Array


def dynamic_loss_scale(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    *,
    min_scale: float | None = None,
    max_scale: float | None = None,
    enabled: bool = True,
) -> optax.GradientTransformation:
    """Unscales float32 gradients, says in its state whether any was inf or NaN, and moves the scale.

    The caller multiplies the loss by `current_scale(state)`, and skips the update where `state.found_inf` says so.
    The scale stays within `min_scale` and `max_scale`; without them, as PyTorch's, it can fall to 0 and rise to what
    float32 holds. With `enabled` False this is `no_loss_scale()`. Raises `UserError` for values that make no sense.

    >>> scaler = dynamic_loss_scale(init_scale=4.0, growth_interval=1)
    >>> state = scaler.init(None)
    >>> grads, state = scaler.update({"w": jnp.array([8.0])}, state)
    >>> float(grads["w"][0]), float(state.scale), bool(state.found_inf)
    (2.0, 8.0, False)
    >>> _, state = scaler.update({"w": jnp.array([jnp.inf])}, state)
    >>> float(state.scale), bool(state.found_inf)
    (4.0, True)
    """
    if not enabled:
        return no_loss_scale()
    _check(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    return _Rule(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale).transformation()


def static_loss_scale(scale: float) -> optax.GradientTransformation:
    """A scale that never moves, under which an inf or NaN is still found and its update skipped.

    Both factors are 1, and so in PyTorch what `state_dict` writes never moves either. Raises `UserError` for a scale
    that float32 does not hold.

    >>> scaler = static_loss_scale(1024.0)
    >>> _, state = scaler.update(jnp.array([jnp.nan]), scaler.init(None))
    >>> float(state.scale), bool(state.found_inf), int(state.skipped)
    (1024.0, True, 1)
    """
    _check_scales(scale=scale)
    return _Rule(scale, 1.0, 1.0).transformation()


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


def consecutive(state: Any) -> jax.Array | int:
    """How many updates in a row were non-finite until now: 0 without scaling."""
    return state.consecutive if isinstance(state, LossScaleState) else 0


def state_dict(scaler: optax.GradientTransformation, state: Any) -> dict[str, Any]:
    """What `GradScaler.state_dict()` returns: five Python numbers; nothing without scaling.

    PyTorch knows of no bounds and no counts of skips: those are not in it. Raises `UserError` for a transformation
    that is no scaler of this module.

    >>> scaler = dynamic_loss_scale()
    >>> state_dict(scaler, scaler.init(None))  # doctest: +NORMALIZE_WHITESPACE
    {'scale': 65536.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
    """
    if isinstance(state, optax.EmptyState):
        return {}
    rule = getattr(scaler.update, "__self__", None)
    if not isinstance(rule, _Rule) or not isinstance(state, LossScaleState):
        raise UserError(f"a {type(state).__name__} is not the state of a loss scale: give the scaler and its own state")
    return {
        "scale": float(state.scale),
        "growth_factor": float(rule.growth_factor),
        "backoff_factor": float(rule.backoff_factor),
        "growth_interval": int(rule.growth_interval),
        "_growth_tracker": int(state.growth_tracker),
    }


def load_state_dict(
    saved: Mapping[str, Any], *, min_scale: float | None = None, max_scale: float | None = None
) -> optax.GradientTransformation:
    """The scaler of a `state_dict`, PyTorch's or ours: its `init` gives the state that was saved.

    Raises `UserError` for an entry that is missing or makes no sense, a scale that has fallen to 0 among them.

    >>> saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}
    >>> scaler = load_state_dict(saved)
    >>> _, state = scaler.update(jnp.ones(1), scaler.init(None))
    >>> float(state.scale), int(state.growth_tracker)
    (16.0, 0)
    """
    if not saved:
        raise UserError("the saved loss scale is empty, as that of a disabled scaler: use no_loss_scale() instead")
    missing = [name for name in _SAVED if name not in saved]
    if missing:
        raise UserError(f"the saved loss scale has no {', '.join(missing)}: give what GradScaler.state_dict() returns")
    scale, growth_factor, backoff_factor, growth_interval, tracker = (saved[name] for name in _SAVED)
    if not isinstance(tracker, int | np.integer) or not 0 <= tracker < 2**31:
        raise UserError(f"_growth_tracker {tracker} is not a number of updates: make it 0 to start the count again")
    static = growth_factor == backoff_factor == 1
    growth, backoff = (2.0, 0.5) if static else (growth_factor, backoff_factor)
    _check(scale, growth, backoff, growth_interval, min_scale, max_scale)
    rule = _Rule(scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, int(tracker))
    return rule.transformation()


_SAVED = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class _Rule:
    """How a scale moves. Its methods are the transformation's functions, where `state_dict` finds it again."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    growth_tracker: int = 0

    def transformation(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self.init, self.update)

    def init(self, params: Any) -> LossScaleState:
        del params
        scale, tracker = jnp.array(self.init_scale, np.float32), jnp.array(self.growth_tracker, np.int32)
        return LossScaleState(scale, tracker, jnp.array(False), jnp.zeros([], np.int32), jnp.zeros([], np.int32))

    def update(self, grads: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        del params
        unscaled = _unscaled(grads, state.scale)
        found_inf = ~all_finite(grads, unscaled)
        tracker = jnp.where(found_inf, 0, state.growth_tracker + 1)
        grow = tracker == self.growth_interval
        grown = self._bounded(_times(state.scale, self.growth_factor))
        grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
        shrunk = self._bounded(_times(state.scale, self.backoff_factor))
        new = LossScaleState(
            scale=jnp.where(found_inf, shrunk, jnp.where(grow, grown, state.scale)),
            growth_tracker=jnp.where(grow, 0, tracker),
            found_inf=found_inf,
            skipped=state.skipped + found_inf.astype(np.int32),
            consecutive=jnp.where(found_inf, state.consecutive + 1, 0),
        )
        return unscaled, new

    def _bounded(self, scale: jax.Array) -> jax.Array:
        if self.min_scale is not None:
            scale = jnp.maximum(scale, np.float32(self.min_scale))
        if self.max_scale is not None:
            scale = jnp.minimum(scale, np.float32(self.max_scale))
        return scale


def _check(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None,
    max_scale: float | None,
) -> None:
    if not 1 < growth_factor < np.inf:
        raise UserError(f"growth_factor {growth_factor} grows nothing: make it finite and above 1, such as 2")
    if not 0 < backoff_factor < 1:
        raise UserError(f"backoff_factor {backoff_factor} is no share: choose above 0 and below 1, such as 0.5")
    if not _known(growth_interval, lambda n: isinstance(n, int | np.integer) and 1 <= n < 2**31):
        raise UserError(f"growth_interval {growth_interval} is not a number of updates: choose 1 to {2**31 - 1}")
    _check_scales(init_scale=init_scale, min_scale=min_scale, max_scale=max_scale)
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise UserError(f"min_scale {min_scale} is above max_scale {max_scale}: exchange them")
    if not _known(init_scale, lambda scale: (min_scale or 0) <= scale <= (max_scale or np.inf)):
        raise UserError(
            f"init_scale {init_scale} is outside min_scale {min_scale} to max_scale {max_scale}: move it in"
        )


def _check_scales(**scales: float | None) -> None:
    """Raises `UserError` for one that float32 does not hold as a normal, positive number."""
    limits = np.finfo(np.float32)
    for name, scale in scales.items():
        if scale is not None and not _known(scale, lambda scale: float(limits.tiny) <= scale <= float(limits.max)):
            raise UserError(f"{name} {scale} scales nothing: choose a positive float32, such as 65536")


def _known(value: Any, sensible: Callable[[Any], Any]) -> bool:
    """Whether the value is sensible, or one that JAX traces, which nobody can know yet."""
    return isinstance(value, jax.core.Tracer) or bool(sensible(value))


def _unscaled(grads: Any, scale: jax.Array) -> Any:
    """`grads` over `scale`, as PyTorch unscales: by the reciprocal, rounded once.

    In two factors where the reciprocal would be subnormal, which XLA's CPU flushes to 0; a power of two rounds nothing.
    """
    step = jnp.where(scale > np.float32(2.0**64), np.float32(2.0**-64), np.float32(1))
    inverse = 1 / (scale * step)
    return jax.tree.map(lambda g: g * step.astype(g.dtype) * inverse.astype(g.dtype), grads)


def _times(scale: jax.Array, factor: float) -> jax.Array:
    """float32 by a double, rounded once, as PyTorch's kernel multiplies: 1.7 is no float32."""
    with jax.enable_x64(True):
        return (scale.astype(np.float64) * factor).astype(np.float32)
