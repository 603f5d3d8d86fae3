"""Loss scales by layer: one for the gradients inside each marked block, and one for the loss.

A scale halves when an overflow originates in its block, whatever other blocks received, and doubles after
`growth_interval` applied updates without one. An adaptive scale is chosen in every backward pass from the gradient that
enters the block, times a factor that changes by this rule and is at most 1. Any non-finite gradient skips the update,
as with a single scale.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.labs.loss_scales.block_scales import BlockValues
from jaxtrain.step.loss_scale import (
    LossScaleState,
    ScaleRule,
    check_growth_interval,
    check_scales,
    satisfies,
    unscale,
)
from jaxtrain.step.nonfinite import all_finite

_SMALLEST = 2.0**-24  # float16
# The quotient of two scales is a float32.
_LOWEST, _HIGHEST = 2.0**-60, 2.0**60


class BlockScales(NamedTuple):
    """Loss scales of the marked blocks of a program.

    Attributes:
      scale: float32[blocks], the factor of the gradients inside each block, a power of two; if it is adaptive, that of
        the last update.
      growth_tracker: int32[blocks], applied updates since the block overflowed or its scale or backoff grew.
      backoff: float32[blocks], factor of an adaptive scale, lowered by overflows; None if scales follow only them.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    backoff: jax.Array | None

    def used(self, new: "BlockScales") -> jax.Array:
        """Return the scales of the update between these and the `new` ones; adaptive ones are the window's largest."""
        return (self if self.backoff is None else new).scale


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

    With `underflow` the scale of a block is adaptive: each backward pass chooses the smallest power of two with which
    an element of the gradient that enters the block would underflow with at most this probability, if it were normally
    distributed with mean 0. A factor of 16 remains between the largest element and the largest float16. An overflow
    in the block halves a factor of its scale, which grows back to 1.

    Args:
      blocks: Number of blocks of the model that `jaxtrain.block` marks; a scan over 12 layers has 12.
      underflow: Probability in (0, 1) that an element of a float16 gradient underflows, such as 1e-6. None for scales
        that follow overflows only.
      init_scale: First scale of the loss, and of all blocks unless they are adaptive, a power of two.
      growth_interval: Applied updates without an overflow after which a scale grows.
      min_scale: Lower bound of the scales that are not adaptive, a power of two.
      max_scale: Upper bound of the scales that are not adaptive, a power of two.

    Returns:
      A loss scaler, whose state is a `LossScaleState` with scales of blocks.

    Raises:
      UserError: An argument is out of range.

    Example:
      >>> from jaxtrain.labs.loss_scales import BlockValues
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
        raise UserError(f"underflow must be in (0, 1), got {underflow}: use 1e-6, or None for no statistics")
    check_growth_interval(growth_interval)
    check_scales(init_scale=init_scale, min_scale=min_scale, max_scale=max_scale)
    for name, scale in {"min_scale": min_scale, "init_scale": init_scale, "max_scale": max_scale}.items():
        if not satisfies(scale, lambda scale: _LOWEST <= scale <= _HIGHEST and np.frexp(scale)[0] == 0.5):
            raise UserError(f"{name} must be a power of two in [2**-60, 2**60], got {scale}: use 65536 for init_scale")
    if not satisfies(init_scale, lambda scale: min_scale <= scale <= max_scale):
        raise UserError(f"init_scale {init_scale} must be in [min_scale, max_scale]: [{min_scale}, {max_scale}]")
    rule = PerLayerRule(init_scale, 2.0, 0.5, growth_interval, min_scale, max_scale, 0, int(blocks), underflow)
    return rule.transformation()


def target_rms(underflow: float) -> float:
    """Return the standard deviation with which normal elements underflow in float16 with this probability.

    Zhao et al. 2019: P(|g| < u) = erf(u / (σ√2)), so that the scale is u / (σ √2 erfinv(p)). Their σ is that of a
    product, estimated from its operands, and their published code rounds the scale down; here σ is that of the gradient
    that enters a block, and the scale is rounded up, so that the probability stays below p.
    """
    return _SMALLEST / NormalDist().inv_cdf((1 + underflow) / 2)  # √2 erfinv(p)


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

    def init(self, params: Any) -> LossScaleState:
        """Return the state before the first update."""
        of_loss = super().init(params)
        scale = jnp.full(self.blocks, self.init_scale, np.float32)
        backoff = None if self.underflow is None else jnp.ones(self.blocks, np.float32)
        return of_loss._replace(blocks=BlockScales(scale, jnp.zeros(self.blocks, np.int32), backoff))

    def update(  # type: ignore[override]
        self, grads: Any, state: LossScaleState, params: Any = None, *, observed: BlockValues, **_: Any
    ) -> tuple[Any, LossScaleState]:
        """Return the unscaled gradients and the state after an update in which this was `observed`."""
        del params
        unscaled = unscale(grads, state.scale)
        found_inf = ~all_finite(grads, optax.tree.norm(unscaled))
        overflows = ~(observed.overflow <= 0)  # NaN counts
        outside = found_inf & ~overflows.any()
        bounds = np.float32(self.min_scale), np.float32(self.max_scale)
        scale, tracker = self._next(state.scale, state.growth_tracker, outside, found_inf, bounds)
        new = LossScaleState(
            scale=scale,
            growth_tracker=tracker,
            found_inf=found_inf,
            skipped=state.skipped + found_inf.astype(np.int32),
            consecutive=jnp.where(found_inf, state.consecutive + 1, 0),
            blocks=self._next_of_blocks(state, observed, overflows, found_inf),
        )
        return unscaled, new

    def read(self, state: LossScaleState) -> BlockValues:
        """Return what the pass `scale_blocks` reads of a state."""
        blocks: Any = state.blocks
        zeros = jnp.zeros_like(blocks.scale)
        if blocks.backoff is None or self.underflow is None:
            return BlockValues(blocks.scale / state.scale, zeros)
        return BlockValues(blocks.backoff, zeros, jnp.full_like(zeros, target_rms(self.underflow)))

    def _next_of_blocks(
        self, state: LossScaleState, observed: BlockValues, overflows: jax.Array, skipped: jax.Array
    ) -> BlockScales:
        blocks: Any = state.blocks
        scale, tracker, backoff = blocks
        if backoff is None:
            bounds = np.float32(self.min_scale), np.float32(self.max_scale)
            return BlockScales(*self._next(scale, tracker, overflows, skipped, bounds), None)
        used = jnp.where(observed.scale > 0, observed.scale * state.scale, scale)
        bounds = np.float32(_LOWEST), np.float32(1)
        backoff, tracker = self._next(backoff, tracker, overflows, skipped, bounds)
        return BlockScales(used, tracker, backoff)

    def _next(
        self,
        scale: jax.Array,
        tracker: jax.Array,
        overflows: jax.Array,
        skipped: jax.Array,
        bounds: tuple[np.float32, np.float32],
    ) -> tuple[jax.Array, jax.Array]:
        """Return scales and trackers after an update, which counts only if it was applied or overflowed."""
        tracker = jnp.where(overflows, 0, jnp.where(skipped, tracker, tracker + 1))
        grow = tracker == self.growth_interval
        lower = jnp.maximum(np.float32(self.backoff_factor) * scale, bounds[0])
        higher = jnp.minimum(np.float32(self.growth_factor) * scale, bounds[1])
        return jnp.where(overflows, lower, jnp.where(grow, higher, scale)), jnp.where(grow, 0, tracker)
