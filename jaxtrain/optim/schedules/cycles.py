"""Cyclic schedules of the learning rate and of the momentum."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.optim.arguments import bounded
from jaxtrain.optim.schedules.arithmetic import cos_squared, dtype, power_of, ratio, to_float
from jaxtrain.optim.schedules.scheduler import Rate, Scheduler, absolute


@bounded
def cyclic_lr(
    base_lr: float,
    max_lr: float,
    step_size_up: int = 2000,
    step_size_down: int | None = None,
    mode: str = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[Any], Any] | None = None,
    scale_mode: str = "cycle",
) -> Scheduler:
    """`CyclicLR`'s learning rate; `cyclic_momentum` is its momentum. `scale_fn` is a JAX function.

    Args:
      base_lr: Smallest rate.
      max_lr: Largest rate.
      step_size_up: Number of updates of the rising half.
      step_size_down: Number of updates of the falling half; None for `step_size_up`.
      mode: "triangular", "triangular2" or "exp_range".
      gamma: Base of "exp_range".
      scale_fn: JAX function that replaces `mode`.
      scale_mode: "cycle" or "iterations": the argument of `scale_fn`.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `mode` is unknown.

    Example:
      >>> [round(float(cyclic_lr(0.0, 1.0, 2, mode="triangular2")(t)), 6) for t in range(8)]
      [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    height = _triangles(step_size_up, step_size_down, mode, gamma, scale_fn, scale_mode)
    return absolute(base_lr, lambda t: base_lr + (max_lr - base_lr) * height(t))


@bounded
def cyclic_momentum(
    base_momentum: float = 0.8,
    max_momentum: float = 0.9,
    step_size_up: int = 2000,
    step_size_down: int | None = None,
    mode: str = "triangular",
    gamma: float = 1.0,
    scale_fn: Callable[[Any], Any] | None = None,
    scale_mode: str = "cycle",
) -> Scheduler:
    """`CyclicLR`'s momentum, for an optimizer's `momentum` or `b1`: lowest where the learning rate is highest.

    Args:
      base_momentum: Smallest momentum.
      max_momentum: Largest momentum.
      step_size_up: As for `cyclic_lr`.
      step_size_down: As for `cyclic_lr`.
      mode: As for `cyclic_lr`.
      gamma: As for `cyclic_lr`.
      scale_fn: As for `cyclic_lr`.
      scale_mode: As for `cyclic_lr`.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `mode` is unknown.
    """
    height = _triangles(step_size_up, step_size_down, mode, gamma, scale_fn, scale_mode)
    return absolute(max_momentum, lambda t: max_momentum - (max_momentum - base_momentum) * height(t))


@bounded
def one_cycle_lr(
    max_lr: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Scheduler:
    """`OneCycleLR`'s learning rate; `one_cycle_momentum` is its momentum. It is constant after the last update.

    Args:
      max_lr: Largest rate.
      total_steps: Number of updates of the cycle.
      pct_start: Fraction of the updates with a rising rate.
      anneal_strategy: "cos" or "linear".
      div_factor: `max_lr` over the initial rate.
      final_div_factor: Initial rate over the last one.
      three_phase: Whether the rate falls to the initial rate first.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `anneal_strategy` is unknown, or a phase has no steps.

    Example:
      >>> [round(float(one_cycle_lr(1.0, 5, 0.4, "linear")(t)), 6) for t in range(5)]
      [0.04, 1.0, 0.666668, 0.333336, 4e-06]
    """
    first = max_lr / div_factor
    last = first / final_div_factor
    marks = [first, max_lr, first, last] if three_phase else [first, max_lr, last]
    return annealed(marks, _phases(total_steps, pct_start, three_phase), anneal_strategy)


@bounded
def one_cycle_momentum(
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
    three_phase: bool = False,
) -> Scheduler:
    """`OneCycleLR`'s momentum, for an optimizer's `momentum` or `b1`.

    Args:
      total_steps: Number of updates of the cycle.
      pct_start: Fraction of the updates with a falling momentum.
      anneal_strategy: "cos" or "linear".
      base_momentum: Smallest momentum.
      max_momentum: Largest momentum.
      three_phase: As for `one_cycle_lr`.

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `anneal_strategy` is unknown, or a phase has no steps.
    """
    marks = [max_momentum, base_momentum, max_momentum, *([max_momentum] if three_phase else [])]
    return annealed(marks, _phases(total_steps, pct_start, three_phase), anneal_strategy)


def annealed(marks: Sequence[float], ends: Sequence[float], strategy: str) -> Scheduler:
    """Interpolate from each mark to the next over a phase, by "cos" or "linear"; the first phase starts at update 0.

    Args:
      marks: Values at the start and at the end of each phase.
      ends: Last update of each phase.
      strategy: "cos" or "linear".

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `strategy` is unknown, or a phase has no steps.

    Example:
      >>> [round(float(annealed([0.0, 1.0, 0.0], [1, 3], "linear")(t)), 6) for t in range(5)]
      [0.0, 1.0, 0.5, 0.0, 0.0]
    """
    if strategy not in ("cos", "linear"):
        raise UserError(f"anneal_strategy {strategy!r} is unknown: use 'cos' or 'linear'")
    phases = list(pairwise([0.0, *ends]))
    if any(start == end for start, end in phases):
        raise UserError(f"phases that end at {list(ends)} include one without steps: change pct_start or total_steps")

    def rate(t: jax.Array) -> jax.Array:
        t = jnp.minimum(t, int(ends[-1]))
        values = []
        for (start, end), (a, b) in zip(phases, pairwise(marks), strict=True):
            x = (to_float(t) - start) / (end - start)
            values.append(b + (a - b) * cos_squared(x) if strategy == "cos" else a + (b - a) * x)
        value = values.pop()
        for end in reversed(ends[:-1]):
            value = jnp.where(t <= math.floor(end), values.pop(), value)
        return value

    return absolute(marks[0], rate)


def _triangles(
    up: int, down: int | None, mode: str, gamma: float, scale_fn: Callable[[Any], Any] | None, scale_mode: str
) -> Rate:
    """Return triangles from 0 to 1 and back, each of them scaled."""
    total = up + (up if down is None else down)
    modes: dict[str, Rate] = {
        "triangular": lambda t: jnp.ones([], dtype()),
        "triangular2": lambda t: power_of(0.5, t // total),
        "exp_range": lambda t: power_of(gamma, t),
    }
    if scale_fn is None and mode not in modes:
        raise UserError(f"mode {mode!r} is unknown: use one of {', '.join(modes)}, or a scale_fn")

    def scale(t: jax.Array) -> jax.Array:
        if scale_fn is None:
            return modes[mode](t)
        return jnp.asarray(scale_fn(to_float(1 + t // total if scale_mode == "cycle" else t)), dtype())

    def height(t: jax.Array) -> jax.Array:
        since = t % total
        return jnp.where(since <= up, ratio(since, up), ratio(total - since, max(total - up, 1))) * scale(t)

    return height


def _phases(total_steps: int, pct_start: float, three_phase: bool) -> list[float]:
    """Return the last update of each phase of `OneCycleLR`."""
    first = pct_start * total_steps - 1
    return [first, *([2 * first] if three_phase else []), total_steps - 1]
