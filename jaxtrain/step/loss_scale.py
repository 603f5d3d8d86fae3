"""Loss scaling with the semantics of `torch.amp.GradScaler`, as an optax gradient transformation.

The arithmetic is that of `torch/amp/grad_scaler.py` and `aten/src/ATen/native/cuda/AmpKernels.cu`
(`_amp_update_scale_`): the scale doubles after `growth_interval` consecutive finite updates, unless the doubled scale
would not be finite; on any inf or NaN it halves, and the count of finite updates restarts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.passes.pipeline import Rewrite
from jaxtrain.paths import Frozen
from jaxtrain.step.nonfinite import all_finite


class LossScaleState(NamedTuple):
    """State of a loss scaler.

    Attributes:
      scale: float32[], factor of the loss.
      growth_tracker: int32[], consecutive finite updates.
      found_inf: bool[], whether the last update was non-finite.
      skipped: int32[], non-finite updates so far.
      consecutive: int32[], consecutive non-finite updates up to now.
      blocks: The scales of a scaler with several, `BlockScales`; None of one with one.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    found_inf: jax.Array
    skipped: jax.Array
    consecutive: jax.Array
    blocks: "BlockScales | None" = None


class BlockScales(Protocol):
    """Scales of blocks of a program, in the state of a scaler; a pytree."""

    def used(self, new: Any) -> jax.Array:
        """Return the scales of the update between these and the `new` ones, float32[blocks]."""
        ...


class ScalerValues(Protocol):
    """What a pass of a scaler reads, a pytree; its probes and what it observes have the same structure."""

    def rewrite(self, probes: Any, frozen: Frozen) -> Rewrite:
        """Return the pass `scale_blocks`.

        Args:
          probes: Zeros, whose gradient is what the scaler's `update` takes as `observed`.
          frozen: Predicate on the paths of parameters that are not trained.
        """
        ...


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
    """Unscale gradients and adapt the loss scale, as `torch.amp.GradScaler`.

    The caller multiplies the loss by `current_scale(state)` and skips the update if `state.found_inf`.

    Args:
      init_scale: First scale, a positive float32.
      growth_factor: Factor of a growing scale, finite and above 1.
      backoff_factor: Factor of the scale after an inf or NaN, in (0, 1).
      growth_interval: Consecutive finite updates after which the scale grows.
      min_scale: Lower bound of the scale. None for none, as in PyTorch: the scale can fall to 0.
      max_scale: Upper bound of the scale. None for none, as in PyTorch: the scale can rise to float32's maximum.
      enabled: If False, return `no_loss_scale()`.

    Returns:
      An optax transformation of float32 gradients, whose state is a `LossScaleState`.

    Raises:
      UserError: An argument is out of range.

    Example:
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
    return ScaleRule(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale).transformation()


def static_loss_scale(scale: float) -> optax.GradientTransformation:
    """Unscale gradients by a constant scale; an update with an inf or NaN is still skipped.

    Both factors are 1, so that the scale stays constant in PyTorch too after `state_dict`.

    Args:
      scale: The scale, a positive float32.

    Returns:
      An optax transformation of float32 gradients, whose state is a `LossScaleState`.

    Raises:
      UserError: `scale` is not a positive, normal float32.

    Example:
      >>> scaler = static_loss_scale(1024.0)
      >>> _, state = scaler.update(jnp.array([jnp.nan]), scaler.init(None))
      >>> float(state.scale), bool(state.found_inf), int(state.skipped)
      (1024.0, True, 1)
    """
    check_scales(scale=scale)
    return ScaleRule(scale, 1.0, 1.0).transformation()


def no_loss_scale() -> optax.GradientTransformation:
    """Return the identity with an empty state, as `GradScaler(enabled=False)`."""
    return optax.identity()


def is_scaled(state: Any) -> bool:
    """Return whether a state is that of a loss scale."""
    return isinstance(state, LossScaleState)


def current_scale(state: Any) -> jax.Array | float:
    """Return the factor of the loss, float32[]; 1.0 without scaling."""
    return state.scale if is_scaled(state) else 1.0


def found_inf(state: Any) -> jax.Array | bool:
    """Return whether the last update was non-finite and must be skipped, bool[]; False without scaling."""
    return state.found_inf if is_scaled(state) else False


def skipped_updates(state: Any) -> jax.Array | int:
    """Return the number of non-finite updates so far, int32[]; 0 without scaling."""
    return state.skipped if is_scaled(state) else 0


def consecutive_skips(state: Any) -> jax.Array | int:
    """Return the number of consecutive non-finite updates up to now, int32[]; 0 without scaling."""
    return state.consecutive if is_scaled(state) else 0


def used_scales(old: Any, new: Any) -> jax.Array | None:
    """Return the scales of blocks in the update between two states, float32[blocks]; None unless blocks have scales."""
    return old.blocks.used(new.blocks) if is_scaled(old) and old.blocks is not None else None


def read_by_passes(scaler: optax.GradientTransformation, state: Any) -> ScalerValues | None:
    """Return what a pass reads of a scaler and its state; None for a scaler without a pass."""
    rule = getattr(scaler.update, "__self__", None)
    return rule.read(state) if isinstance(rule, ScaleRule) else None


def state_dict(scaler: optax.GradientTransformation, state: Any) -> dict[str, Any]:
    """Export a loss scaler in the format of `GradScaler.state_dict()`.

    PyTorch has neither bounds nor counts of skipped updates: they are not exported. Of a scaler with scales of blocks
    the scale of the loss is exported, which PyTorch then uses, and adapts, for all layers.

    Args:
      scaler: `dynamic_loss_scale`, `static_loss_scale`, `no_loss_scale`, or one with scales of blocks.
      state: State of the scaler.

    Returns:
      A dict of five Python numbers; empty without scaling.

    Raises:
      UserError: `scaler` or `state` is not of this module.

    Example:
      >>> scaler = dynamic_loss_scale()
      >>> state_dict(scaler, scaler.init(None))  # doctest: +NORMALIZE_WHITESPACE
      {'scale': 65536.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
    """
    if isinstance(state, optax.EmptyState):
        return {}
    rule = getattr(scaler.update, "__self__", None)
    if not isinstance(rule, ScaleRule) or not is_scaled(state):
        raise UserError(
            f"state must be that of a loss scaler, got {type(state).__name__}: pass the scaler and its state"
        )
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
    """Restore a loss scaler from the format of `GradScaler.state_dict()`.

    Args:
      saved: What PyTorch's `state_dict` or `state_dict` of this module returned.
      min_scale: Lower bound of the scale, or None.
      max_scale: Upper bound of the scale, or None.

    Returns:
      A loss scaler whose `init` returns the saved state.

    Raises:
      UserError: An entry is missing or out of range, a scale of 0 for example.

    Example:
      >>> saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5}
      >>> saved |= {"growth_interval": 3, "_growth_tracker": 2}
      >>> scaler = load_state_dict(saved)
      >>> _, state = scaler.update(jnp.ones(1), scaler.init(None))
      >>> float(state.scale), int(state.growth_tracker)
      (16.0, 0)
    """
    if not saved:
        raise UserError("the saved loss scale is empty, as that of a disabled GradScaler: use no_loss_scale() instead")
    missing = [name for name in _SAVED if name not in saved]
    if missing:
        raise UserError(f"the saved loss scale lacks {', '.join(missing)}: pass what GradScaler.state_dict() returned")
    scale, growth_factor, backoff_factor, growth_interval, tracker = (saved[name] for name in _SAVED)
    if not isinstance(tracker, int | np.integer) or not 0 <= tracker < 2**31:
        raise UserError(f"_growth_tracker must be an integer in [0, 2**31), got {tracker}: use 0 to restart the count")
    static = growth_factor == backoff_factor == 1
    growth, backoff = (2.0, 0.5) if static else (growth_factor, backoff_factor)
    _check(scale, growth, backoff, growth_interval, min_scale, max_scale)
    rule = ScaleRule(scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, int(tracker))
    return rule.transformation()


_SAVED = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class ScaleRule:
    """How a scale changes. The transformation's functions are its methods, through which `state_dict` reads it."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    growth_tracker: int = 0

    def transformation(self) -> optax.GradientTransformation:
        """Return the loss scaler."""
        return optax.GradientTransformation(self.init, self.update)

    def init(self, params: Any) -> LossScaleState:
        """Return the state before the first update."""
        del params
        scale, tracker = jnp.array(self.init_scale, np.float32), jnp.array(self.growth_tracker, np.int32)
        return LossScaleState(scale, tracker, jnp.array(False), jnp.zeros([], np.int32), jnp.zeros([], np.int32))

    def update(self, grads: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        """Return the unscaled gradients and the state after an update."""
        del params
        unscaled = unscale(grads, state.scale)
        found_inf = ~all_finite(grads, optax.tree.norm(unscaled))
        tracker = jnp.where(found_inf, 0, state.growth_tracker + 1)
        grow = tracker == self.growth_interval
        grown = self._clamp(_multiply(state.scale, self.growth_factor))
        grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
        shrunk = self._clamp(_multiply(state.scale, self.backoff_factor))
        new = LossScaleState(
            scale=jnp.where(found_inf, shrunk, jnp.where(grow, grown, state.scale)),
            growth_tracker=jnp.where(grow, 0, tracker),
            found_inf=found_inf,
            skipped=state.skipped + found_inf.astype(np.int32),
            consecutive=jnp.where(found_inf, state.consecutive + 1, 0),
        )
        return unscaled, new

    def read(self, state: LossScaleState) -> ScalerValues | None:
        """Return what a pass reads of a state; None for a scaler without a pass."""
        del state
        return None

    def _clamp(self, scale: jax.Array) -> jax.Array:
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
        raise UserError(f"growth_factor must be finite and > 1, got {growth_factor}: use 2")
    if not 0 < backoff_factor < 1:
        raise UserError(f"backoff_factor must be in (0, 1), got {backoff_factor}: use 0.5")
    check_growth_interval(growth_interval)
    check_scales(init_scale=init_scale, min_scale=min_scale, max_scale=max_scale)
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise UserError(f"min_scale {min_scale} must not exceed max_scale {max_scale}: swap them")
    if not satisfies(init_scale, lambda scale: (min_scale or 0) <= scale <= (max_scale or np.inf)):
        raise UserError(f"init_scale {init_scale} must be in [min_scale, max_scale]: [{min_scale}, {max_scale}]")


def check_growth_interval(growth_interval: int) -> None:
    """Raise `UserError` for a growth interval that is not a positive int32."""
    if not satisfies(growth_interval, lambda n: isinstance(n, int | np.integer) and 1 <= n < 2**31):
        raise UserError(f"growth_interval must be an integer in [1, 2**31), got {growth_interval}: use 2000")


def check_scales(**scales: float | None) -> None:
    """Raise `UserError` for a scale that is not a positive, normal float32."""
    limits = np.finfo(np.float32)
    for name, scale in scales.items():
        if scale is not None and not satisfies(scale, lambda scale: float(limits.tiny) <= scale <= float(limits.max)):
            raise UserError(f"{name} must be a positive float32, got {scale}: use 65536")


def satisfies(value: Any, condition: Callable[[Any], Any]) -> bool:
    """Return whether the value satisfies the condition, or is traced and cannot be checked."""
    return isinstance(value, jax.core.Tracer) or bool(condition(value))


def unscale(grads: Any, scale: jax.Array) -> Any:
    """Multiply gradients by the scale's reciprocal, rounded once, as PyTorch does.

    In two factors if the reciprocal would be subnormal, which XLA:CPU flushes to 0: a power of two is exact.
    """
    step = jnp.where(scale > np.float32(2.0**64), np.float32(2.0**-64), np.float32(1))
    inverse = 1 / (scale * step)
    return jax.tree.map(lambda g: g * step.astype(g.dtype) * inverse.astype(g.dtype), grads)


def _multiply(scale: jax.Array, factor: float) -> jax.Array:
    """Multiply float32 by a double and round once, as PyTorch's kernel does: 1.7 is not a float32."""
    with jax.enable_x64(True):
        return (scale.astype(np.float64) * factor).astype(np.float32)
