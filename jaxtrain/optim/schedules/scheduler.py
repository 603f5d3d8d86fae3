"""The type of all schedules: a function of the number of updates, with PyTorch's recursion."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rate = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Scheduler:
    """An optax schedule with PyTorch's recursion.

    Attributes:
      base: Initial learning rate.
      rate: From the number of an update, int32[], to its learning rate.
      next_rate: From the number of an update and the rate before it to its learning rate, PyTorch's recursion.
      factor: If the rate is the initial one times a factor that depends on `count`: that factor, else None.
      is_multiplicative: Whether the schedule continues from any rate it finds, even at its own update 0.
    """

    base: float
    rate: Rate
    next_rate: Callable[[jax.Array, jax.Array], jax.Array]
    factor: Rate | None = None
    is_multiplicative: bool = False

    def __call__(self, count: Any) -> jax.Array:
        """Return the learning rate of update number `count`, float[]."""
        return self.rate(jnp.asarray(count, np.int32))


def multiplied(lr: float, factor: Rate) -> Scheduler:
    """Return the schedule of a rate times a factor."""

    def next_rate(t: jax.Array, rate: jax.Array) -> jax.Array:
        before = factor(jnp.maximum(t - 1, 0))
        return rate * jnp.where(t == 0, factor(t), factor(t) / jnp.where(before == 0, 1, before))

    return Scheduler(lr, lambda t: lr * factor(t), next_rate, factor)


def absolute(lr: float, rate: Rate) -> Scheduler:
    """Return a schedule that sets the rate, whatever it was before."""
    return Scheduler(lr, rate, lambda t, _: rate(t))
