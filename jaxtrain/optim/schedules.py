"""The schedulers of `torch.optim.lr_scheduler` (`torch/optim/lr_scheduler.py`) as functions of the number of updates.

PyTorch computes most of them by recursion, each rate from the last, which accumulates one rounding per update. Here
they are closed forms, equal to PyTorch's except for that drift. Periods are reduced in integers, and powers are
exponentials of a logarithm computed in double, so that float32 suffices for long runs.

A `Scheduler` is an optax schedule that also has PyTorch's recursion, which `chained` needs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError

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


def step_lr(lr: float, step_size: int, gamma: float = 0.1) -> Scheduler:
    """`StepLR`: multiply the rate by `gamma` every `step_size` updates.

    >>> [round(float(step_lr(1.0, 2)(t)), 6) for t in range(5)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    return _multiplied(lr, lambda t: _power(gamma, t // step_size))


def multi_step_lr(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> Scheduler:
    """`MultiStepLR`: multiply the rate by `gamma` at each milestone; a repeated milestone counts repeatedly."""
    return _multiplied(lr, lambda t: _power(gamma, _count_reached(milestones, t)))


def constant_lr(lr: float, factor: float = 1 / 3, total_iters: int = 5) -> Scheduler:
    """`ConstantLR`: multiply the rate by `factor` for `total_iters` updates."""
    # PyTorch removes the factor at update total_iters, but never at update 0.
    return _multiplied(lr, lambda t: jnp.where((t >= total_iters) & (total_iters > 0), 1.0, factor))


def linear_lr(lr: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> Scheduler:
    """`LinearLR`: from `start_factor` at the first update to `end_factor` after `total_iters`.

    >>> [round(float(linear_lr(1.0, 0.5, total_iters=2)(t)), 6) for t in range(4)]
    [0.5, 0.75, 1.0, 1.0]
    """
    if not 0 < start_factor <= 1:
        raise UserError(f"start_factor must be in (0, 1], got {start_factor}")

    def factor(t: jax.Array) -> jax.Array:
        return start_factor + (end_factor - start_factor) * _ratio(jnp.minimum(t, total_iters), max(total_iters, 1))

    return _multiplied(lr, factor)


def exponential_lr(lr: float, gamma: float) -> Scheduler:
    """`ExponentialLR`: multiply the rate by `gamma` at every update."""
    return _multiplied(lr, lambda t: _power(gamma, t))


def polynomial_lr(lr: float, total_iters: int = 5, power: float = 1.0) -> Scheduler:
    """`PolynomialLR`: decay to 0 over `total_iters` updates."""

    def factor(t: jax.Array) -> jax.Array:
        left = _ratio(jnp.maximum(total_iters - t, 0), max(total_iters, 1)) if total_iters else _float(t) * 0 + 1
        return left**power

    return _multiplied(lr, factor)


def multiplicative_lr(lr: float, lr_lambda: Callable[[Any], Any]) -> Scheduler:
    """`MultiplicativeLR`: multiply the rate by `lr_lambda(count)` at every update, a JAX function of float[].

    The product of `lr_lambda(1)` to `lr_lambda(count)` is recomputed at every update, by a loop of `count` steps.
    """

    def times(t: jax.Array, lr: jax.Array) -> jax.Array:
        return lr * jnp.asarray(lr_lambda(_float(t)), lr.dtype)

    one = jnp.ones([], np.int32)
    return Scheduler(
        lr,
        lambda t: lax.fori_loop(one, t + 1, times, jnp.asarray(lr, _dtype())),
        lambda t, rate: jnp.where(t == 0, rate, times(t, rate)),
        is_multiplicative=True,
    )


def lambda_lr(lr: float, lr_lambda: Callable[[Any], Any]) -> Scheduler:
    """`LambdaLR`: `lr` · `lr_lambda(count)`, a JAX function of float[]."""
    return _absolute(lr, lambda t: lr * jnp.asarray(lr_lambda(_float(t)), _dtype()))


def cosine_annealing_lr(lr: float, t_max: int, eta_min: float = 0.0) -> Scheduler:
    """`CosineAnnealingLR`: a cosine down to `eta_min` at `t_max`, and up again after it.

    After `t_max` PyTorch's recursion amplifies its rounding by up to t_max² (1.4e-12 for 377 updates); this does not.

    >>> [round(float(cosine_annealing_lr(1.0, 2)(t)), 6) for t in range(5)]
    [1.0, 0.5, 0.0, 0.5, 1.0]
    """

    def next_rate(t: jax.Array, rate: jax.Array) -> jax.Array:
        up = (lr - eta_min) * math.sin(math.pi / t_max / 2) ** 2
        before = _half_cosine(t - 1, t_max)
        ratio = _half_cosine(t, t_max) / jnp.where(before == 0, 1, before)
        fallen = ratio * (rate - eta_min) + eta_min
        return jnp.where(t == 0, rate, jnp.where((t - 1 - t_max) % (2 * t_max) == 0, rate + up, fallen))

    return Scheduler(lr, lambda t: eta_min + (lr - eta_min) * _half_cosine(t, t_max), next_rate)


def cosine_annealing_warm_restarts(lr: float, t_0: int, t_mult: int = 1, eta_min: float = 0.0) -> Scheduler:
    """`CosineAnnealingWarmRestarts`: a cosine of `t_0` updates, each further one `t_mult` times as long.

    >>> [round(float(cosine_annealing_warm_restarts(1.0, 2, 2)(t)), 6) for t in range(5)]
    [1.0, 0.5, 1.0, 0.853553, 0.5]
    """
    starts, lengths = [0], [t_0]
    while t_mult > 1 and starts[-1] + lengths[-1] <= np.iinfo(np.int32).max // t_mult:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * t_mult)

    def rate(t: jax.Array) -> jax.Array:
        if t_mult == 1:
            return eta_min + (lr - eta_min) * _half_cosine(t % t_0, t_0)
        cycle = _count_reached(starts, t) - 1
        since, length = t - jnp.array(starts, np.int32)[cycle], jnp.array(lengths, np.int32)[cycle]
        return eta_min + (lr - eta_min) * _cos_squared(_float(since) / _float(length))

    return _absolute(lr, rate)


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

    >>> [round(float(cyclic_lr(0.0, 1.0, 2, mode="triangular2")(t)), 6) for t in range(8)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    height = _triangles(step_size_up, step_size_down, mode, gamma, scale_fn, scale_mode)
    return _absolute(base_lr, lambda t: base_lr + (max_lr - base_lr) * height(t))


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
    """`CyclicLR`'s momentum, for an optimizer's `momentum` or `b1`: lowest where the learning rate is highest."""
    height = _triangles(step_size_up, step_size_down, mode, gamma, scale_fn, scale_mode)
    return _absolute(max_momentum, lambda t: max_momentum - (max_momentum - base_momentum) * height(t))


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

    >>> [round(float(one_cycle_lr(1.0, 5, 0.4, "linear")(t)), 6) for t in range(5)]
    [0.04, 1.0, 0.666668, 0.333336, 4e-06]
    """
    first = max_lr / div_factor
    last = first / final_div_factor
    marks = [first, max_lr, first, last] if three_phase else [first, max_lr, last]
    return annealed(marks, _phases(total_steps, pct_start, three_phase), anneal_strategy)


def one_cycle_momentum(
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
    three_phase: bool = False,
) -> Scheduler:
    """`OneCycleLR`'s momentum, for an optimizer's `momentum` or `b1`."""
    marks = [max_momentum, base_momentum, max_momentum, *([max_momentum] if three_phase else [])]
    return annealed(marks, _phases(total_steps, pct_start, three_phase), anneal_strategy)


def sequential(schedules: Sequence[Callable[[Any], Any]], milestones: Sequence[int]) -> Scheduler:
    """`SequentialLR`: each schedule starts at its milestone, which is its update 0.

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
        rates = [jnp.asarray(schedule(jnp.maximum(t - start, 0)), _dtype()) for schedule, start in pairs]
        return jnp.stack(rates)[_count_reached(milestones, t)]

    return _absolute(float("nan"), rate)


def shifted(schedule: Callable[[Any], Any], by: int) -> Scheduler:
    """Shift a schedule by a number of updates, as for a scheduler stepped more often than its optimizer.

    >>> [round(float(shifted(exponential_lr(1.0, 0.5), 2)(t)), 6) for t in range(2)]
    [0.25, 0.125]
    """
    return _absolute(float("nan"), lambda t: jnp.asarray(schedule(t + by), _dtype()))


def chained(schedules: Sequence[Scheduler]) -> Scheduler:
    """`ChainedScheduler`: apply several schedules to one rate. They have the same `lr`.

    Their factors multiply. With a schedule that has none, PyTorch's recursion is evaluated from update 0 each time: a
    cosine anneals the rate it finds, and a schedule that sets the rate discards those before it.

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
        return _multiplied(base, lambda t: math.prod((f(t) for f in factors), start=jnp.ones([], _dtype())))
    zero = jnp.zeros([], np.int32)
    return Scheduler(base, lambda t: lax.fori_loop(zero, t + 1, next_rate, jnp.asarray(base, _dtype())), next_rate)


def warmup_cosine(lr: float, warmup_steps: int, total_steps: int, final_lr: float = 0.0) -> Scheduler:
    """Linear warmup from 0 to `lr` at `warmup_steps`, then a cosine to `final_lr` at `total_steps`, then constant.

    >>> [round(float(warmup_cosine(1.0, 2, 6)(t)), 6) for t in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    def rate(t: jax.Array) -> jax.Array:
        falling = _ratio(jnp.clip(t - warmup_steps, 0, total_steps - warmup_steps), max(total_steps - warmup_steps, 1))
        fallen = final_lr + (lr - final_lr) * _cos_squared(falling)
        return jnp.where(t < warmup_steps, lr * _ratio(t, max(warmup_steps, 1)), fallen)

    return _absolute(lr, rate)


def wsd(
    lr: float, warmup_steps: int, stable_steps: int, decay_steps: int, final_lr: float = 0.0, decay: str = "linear"
) -> Scheduler:
    """Warmup, stable, decay: linear to `lr`, constant, then to `final_lr` by "linear", "cosine" or "1-sqrt".

    >>> [round(float(wsd(1.0, 2, 2, 4)(t)), 6) for t in (0, 1, 2, 4, 6, 8)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    shapes: dict[str, Rate] = {"linear": lambda x: 1 - x, "cosine": _cos_squared, "1-sqrt": lambda x: 1 - jnp.sqrt(x)}
    if decay not in shapes:
        raise UserError(f"decay {decay!r} is unknown: use one of {', '.join(shapes)}")

    def rate(t: jax.Array) -> jax.Array:
        falling = _ratio(jnp.clip(t - warmup_steps - stable_steps, 0, decay_steps), max(decay_steps, 1))
        fallen = final_lr + (lr - final_lr) * shapes[decay](falling)
        return jnp.where(t < warmup_steps, lr * _ratio(t, max(warmup_steps, 1)), fallen)

    return _absolute(lr, rate)


def _multiplied(lr: float, factor: Rate) -> Scheduler:
    def next_rate(t: jax.Array, rate: jax.Array) -> jax.Array:
        before = factor(jnp.maximum(t - 1, 0))
        return rate * jnp.where(t == 0, factor(t), factor(t) / jnp.where(before == 0, 1, before))

    return Scheduler(lr, lambda t: lr * factor(t), next_rate, factor)


def _absolute(lr: float, rate: Rate) -> Scheduler:
    return Scheduler(lr, rate, lambda t, _: rate(t))


def _triangles(
    up: int, down: int | None, mode: str, gamma: float, scale_fn: Callable[[Any], Any] | None, scale_mode: str
) -> Rate:
    """Return triangles from 0 to 1 and back, each of them scaled."""
    total = up + (up if down is None else down)
    modes: dict[str, Rate] = {
        "triangular": lambda t: jnp.ones([], _dtype()),
        "triangular2": lambda t: _power(0.5, t // total),
        "exp_range": lambda t: _power(gamma, t),
    }
    if scale_fn is None and mode not in modes:
        raise UserError(f"mode {mode!r} is unknown: use one of {', '.join(modes)}, or a scale_fn")

    def scale(t: jax.Array) -> jax.Array:
        if scale_fn is None:
            return modes[mode](t)
        return jnp.asarray(scale_fn(_float(1 + t // total if scale_mode == "cycle" else t)), _dtype())

    def height(t: jax.Array) -> jax.Array:
        since = t % total
        return jnp.where(since <= up, _ratio(since, up), _ratio(total - since, max(total - up, 1))) * scale(t)

    return height


def _phases(total_steps: int, pct_start: float, three_phase: bool) -> list[float]:
    """Return the last update of each phase of `OneCycleLR`."""
    first = pct_start * total_steps - 1
    return [first, *([2 * first] if three_phase else []), total_steps - 1]


def annealed(marks: Sequence[float], ends: Sequence[float], strategy: str) -> Scheduler:
    """Interpolate from each mark to the next over a phase, by "cos" or "linear"; the first phase starts at update 0.

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
            x = (_float(t) - start) / (end - start)
            values.append(b + (a - b) * _cos_squared(x) if strategy == "cos" else a + (b - a) * x)
        value = values.pop()
        for end in reversed(ends[:-1]):
            value = jnp.where(t <= math.floor(end), values.pop(), value)
        return value

    return _absolute(marks[0], rate)


def _dtype() -> Any:
    return jnp.result_type(float)


def _float(t: jax.Array) -> jax.Array:
    return t.astype(_dtype())


def _ratio(part: jax.Array, whole: int) -> jax.Array:
    return _float(part) / whole


def _count_reached(milestones: Sequence[int], t: jax.Array) -> jax.Array:
    """Return the number of milestones that `t` has reached, int32[]."""
    return jnp.searchsorted(jnp.array(sorted(milestones), np.int32), t, side="right").astype(np.int32)


def _power(base: float, t: jax.Array) -> jax.Array:
    """Return baseᵗ of a count, with the logarithm in double: the error of a float32 base grows with t."""
    if base > 0:
        return jnp.exp(_float(t) * math.log(base))
    return jnp.asarray(base, _dtype()) ** _float(t)


def _half_cosine(t: jax.Array, half: int) -> jax.Array:
    """Return (1 + cos(πt/half)) / 2."""
    return _cos_squared(_ratio(t % (2 * half), half))


def _cos_squared(x: jax.Array) -> jax.Array:
    """Return (1 + cos πx) / 2 without its cancellation near x = 1."""
    return jnp.cos(x * (math.pi / 2)) ** 2
