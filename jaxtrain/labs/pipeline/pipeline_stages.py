"""Stages of a pipeline and their schedule: 1F1B, and its interleaved form (Narayanan et al. 2021).

Each of p devices has V chunks of layers; chunk c of device s is virtual stage c·p + s. In every tick each device runs
one chunk forward, for one micro-batch, and one chunk backward, for another, so that all devices run the same program. A
window of m micro-batches takes m·V + p − 1 forward and as many backward ticks, of which p − 1 are the bubble.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError


class Unit(NamedTuple):
    """What a device computes in a tick.

    Attributes:
      valid: Whether it computes anything.
      chunk: Which of its chunks.
      micro_batch: Which micro-batch.
    """

    valid: Any
    chunk: Any
    micro_batch: Any


class Schedule(NamedTuple):
    """The schedule of a window.

    Attributes:
      stages: The number p of devices.
      chunks: The number V of chunks of each.
      micro_batches: The number m of micro-batches.

    Example:
      >>> schedule = Schedule(stages=4, chunks=1, micro_batches=16)
      >>> schedule.ticks, schedule.delay, schedule.slots, f"{schedule.bubble:.1%}"
      (22, 3, 7, '15.8%')
      >>> f"{Schedule(4, 2, 16).bubble:.1%}"
      '8.6%'
    """

    stages: int
    chunks: int
    micro_batches: int

    @property
    def delay(self) -> int:
        """The number of ticks before the first backward one."""
        return self.chunks * self.stages - 1

    @property
    def ticks(self) -> int:
        """The number of ticks; forward are all but the last `delay`, backward all but the first."""
        return self.micro_batches * self.chunks + self.stages - 1 + self.delay

    @property
    def slots(self) -> int:
        """The number of forward ticks whose residuals are kept."""
        return 2 * self.delay + 1

    @property
    def bubble(self) -> float:
        """The fraction of the time in which a device waits for others, if ticks take equally long."""
        return (self.stages - 1) / (self.micro_batches * self.chunks + self.stages - 1)

    def forward(self, tick: Any, stage: Any) -> Unit:
        """Return what a device runs forward in a tick."""
        return self._unit(tick - stage, lambda chunk: chunk)

    def backward(self, tick: Any, stage: Any) -> Unit:
        """Return what a device runs backward in a tick."""
        return self._unit(tick - self.delay - (self.stages - 1 - stage), lambda chunk: self.chunks - 1 - chunk)

    def forward_tick(self, unit: Unit, stage: Any) -> Any:
        """Return the tick in which a device runs a unit forward."""
        group, rest = unit.micro_batch // self.stages, unit.micro_batch % self.stages
        return (group * self.chunks + unit.chunk) * self.stages + rest + stage

    def _unit(self, number: Any, order: Callable[[Any], Any]) -> Unit:
        # Each device runs p micro-batches through one of its chunks before the next p, or the next chunk.
        units = self.micro_batches * self.chunks
        valid = (number >= 0) & (number < units)
        number = number.clip(0, units - 1)
        turn, rest = number // self.stages, number % self.stages
        return Unit(valid, order(turn % self.chunks), turn // self.chunks * self.stages + rest)


class Stages:
    """The stages of a pipeline, here without a mesh that divides them. Arrays of all stages are [p, …].

    Attributes:
      size: The number p of devices.
      chunks: The number V of chunks of each.
    """

    def __init__(self, size: int, chunks: int = 1) -> None:
        self.size, self.chunks = size, chunks

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the schedule of a window.

        Raises:
          UserError: Several chunks need a multiple of p micro-batches.
        """
        if self.chunks > 1 and micro_batches % self.size:
            raise UserError(
                f"accumulate {micro_batches} is not divisible by pipeline={self.size}, as pipeline_chunks "
                f"{self.chunks} needs: use a multiple of {self.size}, or pipeline_chunks 1"
            )
        return Schedule(self.size, self.chunks, micro_batches)

    def map(self, fn: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        """Return a function that applies `fn` in every stage."""
        return jax.vmap(fn, in_axes=in_axes)

    def trace(self, make: Callable[[], Any]) -> Any:
        """Return `make()`, which traces functions that `map` is applied to, as within `map`."""
        made = []

        def trace(stage: jax.Array) -> jax.Array:
            made.append(make())
            return stage

        jax.eval_shape(self.map(trace), jnp.arange(self.size))
        return made[0]

    def split(self, x: jax.Array) -> jax.Array:
        """Split an array of all layers, [layers, …], to [V, p, layers / (V·p), …]."""
        return x.reshape(self.chunks, self.size, -1, *x.shape[1:])

    def join(self, x: jax.Array) -> jax.Array:
        """Join an array that `split` has split."""
        return x.reshape(-1, *x.shape[3:])

    def zeros(self, shape: tuple[int, ...], dtype: Any, axis: int = 0) -> jax.Array:
        """Return zeros of all stages, which are an axis of them."""
        del axis
        return jnp.zeros(shape, dtype)

    def shift(self, x: jax.Array, by: int) -> jax.Array:
        """Send the value of every stage to the next one, or, by −1, to the one before."""
        return jnp.roll(x, by, 0)

    def pick(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Return the element `index` [p] of each stage's part of [n, p, …]."""
        return jax.vmap(lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), in_axes=(1, 0))(x, index)

    def pick_shared(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Return the element `index` [p] of an array [n, …] that all stages have, for each stage."""
        return x[index]

    def add(self, x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        """Add `values` [p, …] to the element `index` [p] of each stage's part of [n, p, …]."""
        return x.at[index, np.arange(self.size)].add(values)

    def last(self, x: jax.Array) -> jax.Array:
        """Return the value of the last stage, in all."""
        is_last = np.arange(self.size).reshape(-1, *[1] * (x.ndim - 1)) == self.size - 1
        return jnp.where(is_last, x, jnp.zeros_like(x)).sum(0, dtype=x.dtype)

    def divide(self, x: jax.Array, axis: int | None) -> jax.Array:
        """Return the value of the last stage, of which every stage has a part.

        Args:
          x: Values of all stages.
          axis: The axis of a value that is divided; None for a value that all have.
        """
        del axis
        return self.last(x)

    def collect(self, x: jax.Array, axis: int | None) -> jax.Array:
        """Return a value that `divide` has divided, [p, …] in all."""
        del axis
        return jnp.broadcast_to(x, (self.size, *x.shape))
