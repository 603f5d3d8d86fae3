"""What the forward and backward pass of a micro-batch observe: the gradient by probes.

A statistic of the backward pass, such as the largest gradient of a layer, is the cotangent of a probe: an array of
zeros that a function with a custom derivative takes besides its operands. Those of the forward pass are returned in the
same way.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Probes(NamedTuple):
    """One value for each part of a step that observes the passes; None for parts that the step does not have.

    Three things have this structure: the scales that the passes read, the probes that they are differentiated by, and
    what they observe, which is the gradient by the probes.

    Attributes:
      products: Of delayed scaling, float32[…, 3] for each kernel.
      scaler: Of a loss scaler with a pass of its own, a `ScalerValues`.
    """

    products: Any = None
    scaler: Any = None


NO_PROBES = Probes()
"""Those of a step that observes nothing."""


def zero_probes(scales: Probes) -> Probes:
    """Return the probes of these scales."""
    zeros: Probes = jax.tree.map(jnp.zeros_like, scales)
    return zeros


def observed_together(one: Probes, other: Probes) -> Probes:
    """Return what two micro-batches of a window observe: the elementwise maximum, NaN where either is."""
    both: Probes = jax.tree.map(jnp.maximum, one, other)
    return both
