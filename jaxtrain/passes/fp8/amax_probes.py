"""Probes that several operations observe: arrays of zeros whose gradient is the maximum of what each has observed.

JAX adds the cotangents of a value that is used several times. A probe is therefore copied for each use.
"""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp


def split(probe: jax.Array, n: int) -> list[jax.Array]:
    """Return n copies of a probe, whose gradient is the elementwise maximum of theirs.

    Example:
      >>> def observed(probe):
      ...     first, second = split(probe, 2)
      ...     return 3 * first + 5 * second
      >>> float(jax.grad(observed)(0.0))
      5.0
    """

    @jax.custom_vjp
    def copies(probe: jax.Array) -> list[jax.Array]:
        return [probe] * n

    def backward(_: None, observed: Sequence[jax.Array]) -> tuple[jax.Array]:
        return (reduce(jnp.maximum, observed),)

    copies.defvjp(lambda probe: ([probe] * n, None), backward)
    return copies(probe)


def repeated(probe: jax.Array, n: int) -> jax.Array:
    """Return a probe […] as [n, …] for the steps of a scan; its gradient is the maximum over them.

    Example:
      >>> float(jax.grad(lambda probe: (repeated(probe, 3) * jnp.array([2.0, 7.0, 5.0])).sum())(0.0))
      7.0
    """

    @jax.custom_vjp
    def copies(probe: jax.Array) -> jax.Array:
        return jnp.broadcast_to(probe, (n, *jnp.shape(probe)))

    copies.defvjp(lambda probe: (copies(probe), None), lambda _, observed: (observed.max(0),))
    return copies(probe)
