"""Schedules made of other schedules."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.optim.schedules.arithmetic import count_reached, dtype
from jaxtrain.optim.schedules.scheduler import Scheduler, absolute, multiplied


def sequential(schedules: Sequence[Callable[[Any], Any]], milestones: Sequence[int]) -> Scheduler:
    """`SequentialLR`: each schedule starts at its milestone, which is its update 0.

    Args:
      schedules: The schedules, in order.
      milestones: Number of the first update of each schedule but the first.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: The numbers of schedules and milestones do not fit, or `multiplicative_lr` is not first.

    Example:
      >>> from jaxtrain.optim.schedules import exponential_lr, linear_lr
      >>> schedule = sequential([linear_lr(1.0, 0.5, total_iters=2), exponential_lr(1.0, 0.5)], [2])
      >>> [round(float(schedule(t)), 6) for t in range(5)]
      [0.5, 0.75, 1.0, 0.5, 0.25]
    """
    if len(milestones) != len(schedules) - 1:
        raise UserError(f"{len(schedules)} schedules need {len(schedules) - 1} milestones, got {len(milestones)}")

    if any(isinstance(s, Scheduler) and s.is_multiplicative for s in schedules[1:]):
        raise UserError(
            "multiplicative_lr continues from the rate before it: put it first in sequential, or use lambda_lr"
        )

    def rate(t: jax.Array) -> jax.Array:
        pairs = zip(schedules, [0, *milestones], strict=True)
        rates = [jnp.asarray(schedule(jnp.maximum(t - start, 0)), dtype()) for schedule, start in pairs]
        return jnp.stack(rates)[count_reached(milestones, t)]

    return absolute(float("nan"), rate)


def shifted(schedule: Callable[[Any], Any], by: int) -> Scheduler:
    """Shift a schedule by a number of updates, as for a scheduler stepped more often than its optimizer.

    Args:
      schedule: A schedule.
      by: Number of updates.

    Returns:
      A `Scheduler`.

    Example:
      >>> from jaxtrain.optim.schedules import exponential_lr
      >>> [round(float(shifted(exponential_lr(1.0, 0.5), 2)(t)), 6) for t in range(2)]
      [0.25, 0.125]
    """
    return absolute(float("nan"), lambda t: jnp.asarray(schedule(t + by), dtype()))


def held(schedule: Callable[[Any], Any], every: int) -> Scheduler:
    """Hold each rate of a schedule for a number of updates, as for a scheduler stepped at the end of an epoch.

    Args:
      schedule: A schedule.
      every: Number of updates, at least 1.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `every` is less than 1.

    Example:
      >>> from jaxtrain.optim.schedules import step_lr
      >>> schedule = held(step_lr(1.0, step_size=1, gamma=0.5), every=2)
      >>> [float(schedule(t)) for t in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    if every < 1:
        raise UserError(f"every must be at least 1, got {every}: give the updates of an epoch")
    return absolute(float("nan"), lambda t: jnp.asarray(schedule(t // every), dtype()))


def chained(schedules: Sequence[Scheduler]) -> Scheduler:
    """`ChainedScheduler`: apply several schedules to one rate. They have the same `lr`.

    Their factors multiply. With a schedule that has none, PyTorch's recursion is evaluated from update 0 each time: a
    cosine anneals the rate it finds, and a schedule that sets the rate discards those before it.

    Args:
      schedules: Schedules with the same initial rate.

    Returns:
      A `Scheduler`.

    Example:
      >>> from jaxtrain.optim.schedules import constant_lr, exponential_lr
      >>> schedule = chained([constant_lr(1.0, 0.5, 2), exponential_lr(1.0, 0.9)])
      >>> [round(float(schedule(t)), 6) for t in range(3)]
      [0.5, 0.45, 0.81]
    """
    base = schedules[0].base
    factors = [s.factor for s in schedules if s.factor]

    def next_rate(t: jax.Array, rate: jax.Array) -> jax.Array:
        for schedule in schedules:
            rate = schedule.next_rate(t, rate)
        return rate

    if len(factors) == len(schedules):
        return multiplied(base, lambda t: math.prod((f(t) for f in factors), start=jnp.ones([], dtype())))
    zero = jnp.zeros([], np.int32)
    return Scheduler(base, lambda t: lax.fori_loop(zero, t + 1, next_rate, jnp.asarray(base, dtype())), next_rate)
