"""Loss scales by layer: one for the gradients inside each marked block, and one for the loss.

A scale halves when an overflow originates in its block, whatever other blocks received, and doubles after
`growth_interval` applied updates without one; an adaptive scale is chosen below that from the statistics of gradients.
Any non-finite gradient skips the update, as with a single scale.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.step.loss_scale import (
    BlockScales,
    PerLayerLossScaleState,
    ScaleRule,
    check_growth_interval,
    check_scales,
    satisfies,
    unscale,
)
from jaxtrain.step.nonfinite import all_finite
from jaxtrain.transforms import BlockValues

# Gradients are float16: its smallest subnormal number, and its largest.
_SMALLEST, _LARGEST = 2.0**-24, 65504.0
# Gradients inside a block may be larger than those that enter or leave it.
_HEADROOM = 16.0
# The quotient of two scales is a float32.
_LOWEST, _HIGHEST = 2.0**-60, 2.0**60


def per_layer_loss_scale(
    blocks: int,
    *,
    underflow: float | None = None,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**60,
) -> optax.GradientTransformationExtraArgs:
    """Scale the gradients inside each marked block by a power of two of its own, and adapt it.

    An update with an inf or NaN is skipped, as by `dynamic_loss_scale`. Then the scale of the block in which the
    overflow originated halves, that of the loss if it was outside of all blocks. A scale doubles after
    `growth_interval` applied updates without an overflow of its own.

    With `underflow` the scale of a block is adaptive: the smallest power of two with which a gradient that enters or
    leaves the block would underflow with at most this probability, if its elements were normally distributed with mean
    0. It is bounded by what overflows allow, and leaves a factor of 16 between the largest of these elements and the
    largest float16. Where all elements have underflowed, the scale doubles.

    Args:
      blocks: Number of blocks of the model that `jaxtrain.block` marks; a scan over 12 layers has 12.
      underflow: Probability in (0, 1) that an element of a float16 gradient underflows, such as 1e-3. None for scales
        that follow overflows only.
      init_scale: First scale of the loss and of all blocks, a power of two.
      growth_interval: Applied updates without an overflow after which a scale grows.
      min_scale: Lower bound of all scales, a power of two.
      max_scale: Upper bound of all scales, a power of two.

    Returns:
      A loss scaler, whose state is a `PerLayerLossScaleState`.

    Raises:
      UserError: An argument is out of range.

    Example:
      >>> from jaxtrain.transforms import BlockValues
      >>> scaler = per_layer_loss_scale(3, init_scale=4.0)
      >>> observed = BlockValues(jnp.zeros(3), overflow=jnp.array([0.0, 1.0, 0.0]))
      >>> _, state = scaler.update(jnp.array([jnp.inf]), scaler.init(None), observed=observed)
      >>> float(state.scale), state.blocks.scale.tolist(), bool(state.found_inf)
      (4.0, [4.0, 2.0, 4.0], True)

    References:
      Zhao et al. 2019, Adaptive Loss Scaling for Mixed Precision Training, arXiv:1910.12385.
    """
    if not isinstance(blocks, int | np.integer) or isinstance(blocks, bool) or blocks < 1:
        raise UserError(
            f"blocks must be an integer of at least 1, got {blocks!r}: use the number of layers of the model"
        )
    if underflow is not None and not satisfies(underflow, lambda p: 0 < p < 1):
        raise UserError(f"underflow must be in (0, 1), got {underflow}: use 0.001, or None for no statistics")
    check_growth_interval(growth_interval)
    check_scales(init_scale=init_scale, min_scale=min_scale, max_scale=max_scale)
    for name, scale in {"min_scale": min_scale, "init_scale": init_scale, "max_scale": max_scale}.items():
        if not satisfies(scale, lambda scale: _LOWEST <= scale <= _HIGHEST and np.frexp(scale)[0] == 0.5):
            raise UserError(f"{name} must be a power of two in [2**-60, 2**60], got {scale}: use 65536 for init_scale")
    if not satisfies(init_scale, lambda scale: min_scale <= scale <= max_scale):
        raise UserError(f"init_scale {init_scale} must be in [min_scale, max_scale]: [{min_scale}, {max_scale}]")
    rule = PerLayerRule(init_scale, 2.0, 0.5, growth_interval, min_scale, max_scale, 0, int(blocks), underflow)
    return rule.transformation()


def block_values(state: Any) -> BlockValues | None:
    """Return what a pass reads of the state of a loss scale, and observes; None unless blocks have scales."""
    if not isinstance(state, PerLayerLossScaleState):
        return None
    zeros = jnp.zeros_like(state.blocks.scale)
    spread = None if state.blocks.ceiling is None else zeros
    return BlockValues(state.blocks.scale / state.scale, zeros, spread, spread)


def scales_of_blocks(state: Any) -> jax.Array | None:
    """Return the scales of blocks, float32[blocks]; None unless blocks have scales."""
    return state.blocks.scale if isinstance(state, PerLayerLossScaleState) else None


def scales_blocks(scaler: optax.GradientTransformation) -> bool:
    """Return whether a loss scaler is `per_layer_loss_scale`."""
    return isinstance(getattr(scaler.update, "__self__", None), PerLayerRule)


@dataclass(frozen=True)
class PerLayerRule(ScaleRule):
    """How the scales of blocks and of the loss change."""

    blocks: int = 1
    underflow: float | None = None

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return the loss scaler."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: Any) -> PerLayerLossScaleState:  # type: ignore[override]
        """Return the state before the first update."""
        of_loss = super().init(params)
        scale = jnp.full(self.blocks, self.init_scale, np.float32)
        ceiling = None if self.underflow is None else jnp.full(self.blocks, self.max_scale or _HIGHEST, np.float32)
        return PerLayerLossScaleState(*of_loss, blocks=BlockScales(scale, jnp.zeros(self.blocks, np.int32), ceiling))

    def update(  # type: ignore[override]
        self, grads: Any, state: PerLayerLossScaleState, params: Any = None, *, observed: BlockValues, **_: Any
    ) -> tuple[Any, PerLayerLossScaleState]:
        """Return the unscaled gradients and the state after an update in which this was `observed`."""
        del params
        unscaled = unscale(grads, state.scale)
        found_inf = ~all_finite(grads, unscaled)
        overflows = ~(observed.overflow <= 0)  # NaN counts
        outside = found_inf & ~overflows.any()
        scale, tracker = self._next(state.scale, state.scale, state.growth_tracker, outside, found_inf)
        new = PerLayerLossScaleState(
            scale=scale,
            growth_tracker=tracker,
            found_inf=found_inf,
            skipped=state.skipped + found_inf.astype(np.int32),
            consecutive=jnp.where(found_inf, state.consecutive + 1, 0),
            blocks=self._next_of_blocks(state, observed, overflows, found_inf),
        )
        return unscaled, new

    def _next(
        self, scale: jax.Array, ceiling: jax.Array, tracker: jax.Array, overflows: jax.Array, skipped: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return ceilings and trackers after an update, which counts only if it was applied or overflowed."""
        tracker = jnp.where(overflows, 0, jnp.where(skipped, tracker, tracker + 1))
        grow = tracker == self.growth_interval
        lower = jnp.maximum(np.float32(self.backoff_factor) * scale, np.float32(self.min_scale))
        higher = jnp.minimum(np.float32(self.growth_factor) * ceiling, np.float32(self.max_scale))
        return jnp.where(overflows, lower, jnp.where(grow, higher, ceiling)), jnp.where(grow, 0, tracker)

    def _next_of_blocks(
        self, state: PerLayerLossScaleState, observed: BlockValues, overflows: jax.Array, skipped: jax.Array
    ) -> BlockScales:
        scale, tracker, ceiling = state.blocks
        if ceiling is None:
            return BlockScales(*self._next(scale, scale, tracker, overflows, skipped), None)
        ceiling, tracker = self._next(scale, ceiling, tracker, overflows, skipped)
        wanted = jnp.where(skipped, scale, self._adaptive(scale, state.scale, observed))
        return BlockScales(jnp.minimum(wanted, ceiling), tracker, ceiling)

    def _adaptive(self, scale: jax.Array, of_loss: jax.Array, observed: BlockValues) -> jax.Array:
        """Return the smallest powers of two with which elements underflow as rarely as wanted.

        Zhao et al. 2019: P(|g| < u) = erf(u / (σ√2)) for a normal distribution, so that the scale is u_min / (σ √2
        erfinv(p)), but no more than u_max / max|g|. Their scale is that of a product, with σ estimated from its
        operands, and is rounded down; here σ is that of the gradient itself, and the scale is rounded up, so that the
        probability stays below p.
        """
        assert self.underflow is not None
        assert observed.inverse_rms is not None
        assert observed.largest is not None
        deviations = np.float32(NormalDist().inv_cdf((1 + self.underflow) / 2))  # √2 erfinv(p)
        smallest = np.float32(_SMALLEST) / deviations * of_loss * observed.inverse_rms
        largest = np.float32(_LARGEST / _HEADROOM) * of_loss / jnp.where(observed.largest > 0, observed.largest, 1)
        wanted = jnp.minimum(2 * _power_of_two_below(smallest), _power_of_two_below(largest))
        bounded = jnp.clip(wanted, np.float32(self.min_scale), np.float32(self.max_scale))
        doubled = jnp.minimum(2 * scale, np.float32(self.max_scale or _HIGHEST))
        return jnp.where(observed.inverse_rms > 0, bounded, doubled)


def _power_of_two_below(x: jax.Array) -> jax.Array:
    """Return the largest power of two up to a positive, normal float32."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.int32) & np.int32(0x7F800000), np.float32)
