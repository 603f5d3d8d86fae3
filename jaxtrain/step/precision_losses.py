"""Measure what a low precision loses: the values that it rounds, by layer, and their gradients."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError, user_facing
from jaxtrain.passes import (
    E4M3,
    Counter,
    Counters,
    Formats,
    Policy,
    count_blocks,
    count_rounded,
    gradient_format,
    zero_counters,
)
from jaxtrain.paths import path_name
from jaxtrain.step.accumulate import scaled_mean, split_batch
from jaxtrain.step.build import TrainStep
from jaxtrain.step.checks.fitting_state import require_fitting
from jaxtrain.step.loss_scale import current_scale
from jaxtrain.step.lost_values import LayerLosses, Magnitudes, PrecisionLosses, layer_names
from jaxtrain.step.parts import StepParts
from jaxtrain.step.probes import zero_probes
from jaxtrain.step.state import TrainState, applied_updates, micro_batch_key


class PrecisionMeasurement:
    """A jitted measurement, built by `precision_losses`."""

    def __init__(self, step: TrainStep) -> None:
        parts = step.parts
        if parts.divides_layers:
            raise UserError("precision_losses does not support the mesh axis pipeline: put its devices on data or fsdp")
        self._formats = _formats(parts.loss.policy)
        self._place = step.place
        self.jitted = jax.jit(partial(_count, parts, self._formats), compiler_options=step.compiler_options)

    def __call__(self, state: TrainState, batch: Any) -> PrecisionLosses:
        """Measure the first micro-batch of a batch, of which a step would compute the next update.

        Args:
          state: The state before the step; it is not donated.
          batch: As for the step.

        Returns:
          What the layers lose.
        """
        return self.placed(state, self._place(batch))

    def placed(self, state: TrainState, batch: Any) -> PrecisionLosses:
        """As `__call__`, with a batch that the step's `place` has returned."""
        found, scale = jax.device_get(self.jitted(state, batch))
        values, gradients = dtypes = [jnp.dtype(dtype).name for dtype in self._formats]
        blocks = [jax.tree.map(lambda x: x[i], found.blocks) for i in range(len(found.blocks.weights))]  # noqa: B023
        parts = [found.before, *blocks, found.after]
        layers = [_layer(dtypes, name, x) for name, x in zip(layer_names(len(blocks)), parts, strict=True)]
        counted = tuple(layer for layer in layers if layer.activations.total or layer.weights.total)
        return PrecisionLosses(values, gradients, float(scale), counted)


@user_facing
def precision_losses(step: TrainStep) -> PrecisionMeasurement:
    """Build a measurement of what the precision of a training step loses, layer by layer.

    A value is lost if it is rounded to zero or overflows. To see the values as they are before, the measurement runs
    the step's program with bfloat16, which has the range of float32, in the place of float16, with the same loss scale,
    and counts the magnitudes of all results of products and of conversions, and of their gradients. It takes about as
    long as the gradient of a micro-batch.

    Args:
      step: A step in a precision of 16 bits.

    Returns:
      A function (state, batch) → `PrecisionLosses`, which changes neither.

    Raises:
      UserError: The step's precision is float32, float64 or `fp8_delayed`, or its mesh has the axis pipeline.

    Example:
      >>> import optax
      >>> from jaxtrain import Loss, train_step
      >>> def loss_fn(params, batch, rng):
      ...     return Loss.of(1e-9 * (batch @ params["small"]) + batch @ params["large"]), {}
      >>> step = train_step(loss_fn, optax.sgd(0.1), precision="fp16")
      >>> state = step.init({"small": jnp.ones((4, 2)), "large": jnp.ones((4, 2))})
      >>> losses = precision_losses(step)(state, jnp.ones((8, 4)))
      >>> losses.layers[0].activation_gradients.share("subnormal")
      0.5
      >>> losses.advice()
      []
    """
    return PrecisionMeasurement(step)


def _formats(policy: Policy) -> Formats:
    """Return the dtypes that a policy rounds values and their gradients to."""
    if policy.fp8 is not None:
        if policy.fp8.is_delayed:
            raise UserError("precision_losses does not support fp8 scaling 'delayed': measure precision=\"fp8\"")
        return Formats(E4M3, gradient_format(policy.fp8))
    dtype = policy.param_dtype if policy.compute_dtype is None else policy.compute_dtype
    if jnp.finfo(dtype).bits > 16:
        raise UserError(
            f"precision_losses measures what 16 bits lose, but the step computes in {jnp.dtype(dtype).name}: "
            'use precision="fp16", for example'
        )
    return Formats(dtype, dtype)


def _count(parts: StepParts, formats: Formats, state: TrainState, batch: Any) -> tuple[Counters, jax.Array]:
    """Return the histograms of the first micro-batch, and the loss scale."""
    require_fitting(parts, state, batch)
    k = (
        parts.options.accumulate(applied_updates(state))
        if callable(parts.options.accumulate)
        else parts.options.accumulate
    )
    if not callable(parts.options.accumulate) and k > 1:
        # On a mesh the batch is placed as a window.
        window = batch if parts.loss.is_on_mesh else split_batch(batch, k)
        batch = jax.tree.map(lambda x: x[0], window)
    wide = replace(parts.loss.policy, **_in_bfloat16(parts.loss.policy))
    loss = parts.loss._replace(policy=wide, groups=None, lookups=None, gather=None)
    rest = batch, micro_batch_key(state.rng, state.micro_step), state.model_state
    blocks = count_blocks(loss.with_numerics(), state.params, *rest)
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    is_trained = [jnp.issubdtype(x.dtype, np.floating) and not parts.options.frozen(path_name(p)) for p, x in leaves]
    scale = jnp.asarray(current_scale(state.loss_scale), np.float32)

    scales = parts.scales(state)
    dtype = jnp.bfloat16 if wide.fp8 is None else None

    def scaled_loss(counters: Counters) -> jax.Array:
        observe = partial(count_rounded, dtype=dtype, formats=formats, counters=counters, is_trained=is_trained)
        compute = loss._replace(observe=observe).compute(scales=scales, probes=zero_probes(scales))
        return scaled_mean(compute(state.params, *rest)[0], k, scale)

    return jax.grad(scaled_loss)(zero_counters(blocks, formats)), scale


def _in_bfloat16(policy: Policy) -> dict[str, Any]:
    fields = ("param_dtype", "compute_dtype")
    return {name: jnp.bfloat16 for name in fields if getattr(policy, name) == np.float16}


def _layer(dtypes: Sequence[str], name: str, counts: Counter) -> LayerLosses:
    parts = [Magnitudes.of(*x) for kind in (counts.activations, counts.weights) for x in zip(dtypes, kind, strict=True)]
    return LayerLosses(name, *parts)
