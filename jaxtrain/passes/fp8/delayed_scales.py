"""Scales that follow from the largest magnitudes of earlier updates: TransformerEngine's recipe `DelayedScaling`.

The arithmetic is that of `transformer_engine/common/recipe/delayed_scaling.cu` and of `_default_sf_compute` in
`transformer_engine/pytorch/quantization.py`. Every kernel matrix has three scales, of its rows, of itself and of the
gradient of its product, each with a history. The newest magnitude is at index 0 of a history while it is recorded, and
moves to the end with the update.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.scales import E4M3, E5M2
from jaxtrain.passes.numerics.casts import is_float
from jaxtrain.paths import Matching, path_name

FORMATS = E4M3, E4M3, E5M2
"""The formats of rows, kernel and gradient: TransformerEngine's `Format.HYBRID`."""


class DelayedScales(NamedTuple):
    """State of delayed scaling: trees like the parameters, with None for those that are not multiplied in 8 bits.

    Attributes:
      scale: float32[…, 3] for a kernel […, K, N]: the scales of its rows, of itself and of the gradient.
      amax_history: float32[…, 3, n], the largest magnitudes of the last updates. Index 0 is that of the next one, zero
        between updates; the oldest is at index 1, the newest at the end.
    """

    scale: Any
    amax_history: Any


def init_scales(fp8: Fp8, params: Any) -> DelayedScales:
    """Return the scales before the first update: 1, with empty histories.

    A floating-point parameter with two or more axes has scales for each matrix of its last two, unless `fp8` excludes
    it. Those of a parameter that no product uses, such as a table of embeddings, stay as they are.

    Example:
      >>> scales = init_scales(Fp8("delayed", history=4), {"kernel": jnp.ones((2, 16, 32)), "bias": jnp.ones(32)})
      >>> scales.scale["kernel"].shape, scales.amax_history["kernel"].shape, scales.scale["bias"]
      ((2, 3), (2, 3, 4), None)
    """
    excluded = Matching(fp8.exclude)

    def scale(path: Any, x: Any) -> jax.Array | None:
        has_scale = is_float(x) and x.ndim >= 2 and not excluded(path_name(path))
        return jnp.ones((*x.shape[:-2], len(FORMATS)), np.float32) if has_scale else None

    scales = jax.tree_util.tree_map_with_path(scale, params)
    return DelayedScales(scales, jax.tree.map(lambda x: jnp.zeros((*x.shape, fp8.history), np.float32), scales))


def next_scales(fp8: Fp8, scales: DelayedScales, amax: Any) -> DelayedScales:
    """Record the largest magnitudes of a window, and return the scales of the next one.

    Args:
      fp8: The settings.
      scales: The scales of the window.
      amax: The largest magnitudes, a tree like `scales.scale`. An inf or NaN is recorded as 0: it has no part in the
        next scales.

    Returns:
      The scales: the largest number of the format, divided by 2 to the power of the margin, over the largest magnitude
      of the history. A scale does not change where that is 0, and is float32's largest number where it would overflow.

    Example:
      >>> fp8 = Fp8("delayed", history=2)
      >>> scales = init_scales(fp8, jnp.ones((16, 16)))
      >>> for x in (2.0, 1.0, 1.0):
      ...     scales = next_scales(fp8, scales, jnp.array([x, 0.0, jnp.inf]))
      ...     print(scales.scale.tolist(), scales.amax_history[0].tolist())
      [224.0, 1.0, 1.0] [0.0, 2.0]
      [224.0, 1.0, 1.0] [0.0, 1.0]
      [448.0, 1.0, 1.0] [0.0, 1.0]
    """
    finite = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)), amax)
    scale = jax.tree.map(partial(_next_scale, fp8), scales.scale, scales.amax_history, finite)
    return DelayedScales(scale, jax.tree.map(_rolled, scales.amax_history, finite))


def _next_scale(fp8: Fp8, scale: jax.Array, history: jax.Array, amax: jax.Array) -> jax.Array:
    if fp8.algorithm == "max":
        amax = jnp.maximum(amax, history.max(-1))
    largest = np.array([float(jnp.finfo(dtype).max) * 2.0**-fp8.margin for dtype in FORMATS], np.float32)
    new = jnp.where(amax > 0, jnp.broadcast_to(largest, amax.shape) / amax, scale)
    return jnp.minimum(new, np.finfo(np.float32).max)


def _rolled(history: jax.Array, amax: jax.Array) -> jax.Array:
    """Drop the oldest and append the newest: `torch.roll(history, -1)` with `history[0] = amax`, then 0."""
    return jnp.concatenate([jnp.zeros_like(amax)[..., None], history[..., 2:], amax[..., None]], -1)[
        ..., : history.shape[-1]
    ]
