"""Schedules that decay: by steps, factors, powers and cosines."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.optim.arguments import bounded
from jaxtrain.optim.schedules.arithmetic import (
    cos_squared,
    count_reached,
    dtype,
    half_cosine,
    power_of,
    ratio,
    to_float,
)
from jaxtrain.optim.schedules.scheduler import Scheduler, absolute, multiplied


@bounded
def step_lr(lr: float, step_size: int, gamma: float = 0.1) -> Scheduler:
    """`StepLR`: multiply the rate by `gamma` every `step_size` updates.

    Args:
      lr: Initial learning rate.
      step_size: Number of updates between reductions.
      gamma: Factor of each reduction.

    Returns:
      A `Scheduler`.

    Example:
      >>> [round(float(step_lr(1.0, 2)(t)), 6) for t in range(5)]
      [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    return multiplied(lr, lambda t: power_of(gamma, t // step_size))


@bounded
def multi_step_lr(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> Scheduler:
    """`MultiStepLR`: multiply the rate by `gamma` at each milestone; a repeated milestone counts repeatedly.

    Args:
      lr: Initial learning rate.
      milestones: Numbers of updates at which the rate is reduced.
      gamma: Factor of each reduction.

    Returns:
      A `Scheduler`.
    """
    return multiplied(lr, lambda t: power_of(gamma, count_reached(milestones, t)))


@bounded
def constant_lr(lr: float, factor: float = 1 / 3, total_iters: int = 5) -> Scheduler:
    """`ConstantLR`: multiply the rate by `factor` for `total_iters` updates.

    Args:
      lr: Initial learning rate.
      factor: Factor of the rate.
      total_iters: Number of updates with the factor.

    Returns:
      A `Scheduler`.
    """
    # PyTorch removes the factor at update total_iters, but never at update 0.
    return multiplied(lr, lambda t: jnp.where((t >= total_iters) & (total_iters > 0), 1.0, factor))


@bounded
def linear_lr(lr: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> Scheduler:
    """`LinearLR`: from `start_factor` at the first update to `end_factor` after `total_iters`.

    Args:
      lr: Initial learning rate.
      start_factor: Factor at update 0, in (0, 1].
      end_factor: Factor after `total_iters` updates.
      total_iters: Number of updates of the transition.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `start_factor` is out of range.

    Example:
      >>> [round(float(linear_lr(1.0, 0.5, total_iters=2)(t)), 6) for t in range(4)]
      [0.5, 0.75, 1.0, 1.0]
    """
    if not 0 < start_factor <= 1:
        raise UserError(f"start_factor must be in (0, 1], got {start_factor}")

    def factor(t: jax.Array) -> jax.Array:
        return start_factor + (end_factor - start_factor) * ratio(jnp.minimum(t, total_iters), max(total_iters, 1))

    return multiplied(lr, factor)


@bounded
def exponential_lr(lr: float, gamma: float) -> Scheduler:
    """`ExponentialLR`: multiply the rate by `gamma` at every update.

    Args:
      lr: Initial learning rate.
      gamma: Factor of each update.

    Returns:
      A `Scheduler`.
    """
    return multiplied(lr, lambda t: power_of(gamma, t))


@bounded
def polynomial_lr(lr: float, total_iters: int = 5, power: float = 1.0) -> Scheduler:
    """`PolynomialLR`: decay to 0 over `total_iters` updates.

    Args:
      lr: Initial learning rate.
      total_iters: Number of updates until the rate is 0.
      power: Exponent of the remaining fraction.

    Returns:
      A `Scheduler`.
    """

    def factor(t: jax.Array) -> jax.Array:
        left = ratio(jnp.maximum(total_iters - t, 0), max(total_iters, 1)) if total_iters else to_float(t) * 0 + 1
        return left**power

    return multiplied(lr, factor)


@bounded
def multiplicative_lr(lr: float, lr_lambda: Callable[[Any], Any]) -> Scheduler:
    """`MultiplicativeLR`: multiply the rate by `lr_lambda(count)` at every update, a JAX function of float[].

    The product of `lr_lambda(1)` to `lr_lambda(count)` is recomputed at every update, by a loop of `count` steps.

    Args:
      lr: Initial learning rate.
      lr_lambda: JAX function from an update's number, float[], to its factor.

    Returns:
      A `Scheduler`.
    """

    def times(t: jax.Array, lr: jax.Array) -> jax.Array:
        return lr * jnp.asarray(lr_lambda(to_float(t)), lr.dtype)

    one = jnp.ones([], np.int32)
    return Scheduler(
        lr,
        lambda t: lax.fori_loop(one, t + 1, times, jnp.asarray(lr, dtype())),
        lambda t, rate: jnp.where(t == 0, rate, times(t, rate)),
        is_multiplicative=True,
    )


@bounded
def lambda_lr(lr: float, lr_lambda: Callable[[Any], Any]) -> Scheduler:
    """`LambdaLR`: `lr` · `lr_lambda(count)`, a JAX function of float[].

    Args:
      lr: Initial learning rate.
      lr_lambda: JAX function from an update's number, float[], to a factor of `lr`.

    Returns:
      A `Scheduler`.
    """
    return absolute(lr, lambda t: lr * jnp.asarray(lr_lambda(to_float(t)), dtype()))


@bounded
def cosine_annealing_lr(lr: float, t_max: int, eta_min: float = 0.0) -> Scheduler:
    """`CosineAnnealingLR`: a cosine down to `eta_min` at `t_max`, and up again after it.

    After `t_max` PyTorch's recursion amplifies its rounding by up to t_max² (1.4e-12 for 377 updates); this does not.

    Args:
      lr: Initial learning rate.
      t_max: Number of updates of half a period.
      eta_min: Smallest rate.

    Returns:
      A `Scheduler`.

    Example:
      >>> [round(float(cosine_annealing_lr(1.0, 2)(t)), 6) for t in range(5)]
      [1.0, 0.5, 0.0, 0.5, 1.0]
    """

    def next_rate(t: jax.Array, rate: jax.Array) -> jax.Array:
        up = (lr - eta_min) * math.sin(math.pi / t_max / 2) ** 2
        before = half_cosine(t - 1, t_max)
        ratio = half_cosine(t, t_max) / jnp.where(before == 0, 1, before)
        fallen = ratio * (rate - eta_min) + eta_min
        return jnp.where(t == 0, rate, jnp.where((t - 1 - t_max) % (2 * t_max) == 0, rate + up, fallen))

    return Scheduler(lr, lambda t: eta_min + (lr - eta_min) * half_cosine(t, t_max), next_rate)


@bounded
def cosine_annealing_warm_restarts(lr: float, t_0: int, t_mult: int = 1, eta_min: float = 0.0) -> Scheduler:
    """`CosineAnnealingWarmRestarts`: a cosine of `t_0` updates, each further one `t_mult` times as long.

    Args:
      lr: Initial learning rate.
      t_0: Number of updates of the first cosine.
      t_mult: Factor of the length of each further one.
      eta_min: Smallest rate.

    Returns:
      A `Scheduler`.

    Example:
      >>> [round(float(cosine_annealing_warm_restarts(1.0, 2, 2)(t)), 6) for t in range(5)]
      [1.0, 0.5, 1.0, 0.853553, 0.5]
    """
    starts, lengths = [0], [t_0]
    while t_mult > 1 and starts[-1] + lengths[-1] <= np.iinfo(np.int32).max // t_mult:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * t_mult)

    def rate(t: jax.Array) -> jax.Array:
        if t_mult == 1:
            return eta_min + (lr - eta_min) * half_cosine(t % t_0, t_0)
        cycle = count_reached(starts, t) - 1
        since, length = t - jnp.array(starts, np.int32)[cycle], jnp.array(lengths, np.int32)[cycle]
        return eta_min + (lr - eta_min) * cos_squared(to_float(since) / to_float(length))

    return absolute(lr, rate)
