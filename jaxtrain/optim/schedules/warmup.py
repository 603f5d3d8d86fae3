"""Schedules with a warmup, which PyTorch does not have."""

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.optim.arguments import bounded
from jaxtrain.optim.schedules.arithmetic import cos_squared, ratio
from jaxtrain.optim.schedules.scheduler import Rate, Scheduler, absolute


@bounded
def warmup_cosine(lr: float, warmup_steps: int, total_steps: int, final_lr: float = 0.0) -> Scheduler:
    """Linear warmup from 0 to `lr` at `warmup_steps`, then a cosine to `final_lr` at `total_steps`, then constant.

    Args:
      lr: Largest rate.
      warmup_steps: Number of updates of the warmup.
      total_steps: Number of the update that reaches `final_lr`.
      final_lr: Last rate.

    Returns:
      A `Scheduler`.

    Example:
      >>> [round(float(warmup_cosine(1.0, 2, 6)(t)), 6) for t in (0, 1, 2, 4, 6, 9)]
      [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    def rate(t: jax.Array) -> jax.Array:
        falling = ratio(jnp.clip(t - warmup_steps, 0, total_steps - warmup_steps), max(total_steps - warmup_steps, 1))
        fallen = final_lr + (lr - final_lr) * cos_squared(falling)
        return jnp.where(t < warmup_steps, lr * ratio(t, max(warmup_steps, 1)), fallen)

    return absolute(lr, rate)


@bounded
def wsd(
    lr: float, warmup_steps: int, stable_steps: int, decay_steps: int, final_lr: float = 0.0, decay: str = "linear"
) -> Scheduler:
    """Warmup, stable, decay: linear to `lr`, constant, then to `final_lr` by "linear", "cosine" or "1-sqrt".

    Args:
      lr: Largest rate.
      warmup_steps: Number of updates of the warmup.
      stable_steps: Number of updates at `lr`.
      decay_steps: Number of updates of the decay.
      final_lr: Last rate.
      decay: "linear", "cosine" or "1-sqrt".

    Returns:
      A `Scheduler`.

    Raises:
      UserError: `decay` is unknown.

    Example:
      >>> [round(float(wsd(1.0, 2, 2, 4)(t)), 6) for t in (0, 1, 2, 4, 6, 8)]
      [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    shapes: dict[str, Rate] = {"linear": lambda x: 1 - x, "cosine": cos_squared, "1-sqrt": lambda x: 1 - jnp.sqrt(x)}
    if decay not in shapes:
        raise UserError(f"decay {decay!r} is unknown: use one of {', '.join(shapes)}")

    def rate(t: jax.Array) -> jax.Array:
        falling = ratio(jnp.clip(t - warmup_steps - stable_steps, 0, decay_steps), max(decay_steps, 1))
        fallen = final_lr + (lr - final_lr) * shapes[decay](falling)
        return jnp.where(t < warmup_steps, lr * ratio(t, max(warmup_steps, 1)), fallen)

    return absolute(lr, rate)
