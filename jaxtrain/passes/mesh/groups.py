"""Groups of a micro-batch's rows, and parameters whose gradients are partial sums, one for each group."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Partial(NamedTuple):
    """A parameter whose gradient is computed as partial sums.

    Attributes:
      value: The parameter.
      sums: Zeros, [groups, …]: the gradient of the result by them is the partial sums.
    """

    value: jax.Array
    sums: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LastPartial:
    """A parameter in the last micro-batch of a window, by which the gradient is the sum of the whole window.

    Attributes:
      value: The parameter.
      total: Zeros, […]: the gradient by them is the weighted sum of the window's gradients, added over groups.
      nonfinite: Zeros, [groups]: not zero in the gradient where the last micro-batch's is not finite.
      earlier: The weighted partial sums of the earlier micro-batches, [groups, …].
      weight: The weight of the last micro-batch's gradient.
      sharding: The sharding of the parameter; None without a mesh.
    """

    value: jax.Array
    total: jax.Array
    nonfinite: jax.Array
    earlier: jax.Array
    weight: jax.Array
    sharding: Any = field(metadata={"static": True})


class Groups:
    """The groups of rows, here without a mesh that shards them.

    Attributes:
      axes: The mesh axes that shard the groups.
      sizes: Their sizes.
      size: The number of groups.
      scatters: Whether a device receives only its part of the added sums.
    """

    scatters = False

    def __init__(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.axes, self.sizes, self.size = axes, sizes, math.prod(sizes)

    def of_sums(self, sums: jax.Array) -> "Groups":
        """Return the groups of these sums, [groups, …]: fewer for parameters that groups have of their own."""
        del sums
        return self

    def zeros(self, params: Any) -> Any:
        """Return zeros [groups, …] for every parameter."""
        return jax.tree.map(lambda x: self.shard(jnp.zeros((self.size, *x.shape), x.dtype)), params)

    def shard(self, x: jax.Array, like: Any = None) -> jax.Array:
        """Shard an array [groups, …]: its first axis over the groups, its others as the sharding `like` does."""
        del like
        return x

    def each(self, compute: Callable[..., jax.Array], rows: tuple[int, ...]) -> Callable[..., jax.Array]:
        """Return a function that applies `compute` to the rows of each group, and stacks the results.

        Args:
          compute: A function of arrays.
          rows: The axis of each array that is rows.
        """

        def stacked(*arrays: jax.Array) -> jax.Array:
            parts = [jnp.split(x, self.size, axis) for x, axis in zip(arrays, rows, strict=True)]
            return jnp.stack([compute(*group) for group in zip(*parts, strict=True)])

        return stacked

    def place(self, gradient: jax.Array) -> jax.Array:
        """Return an array [groups, …] whose sum is a gradient of all rows."""
        is_first = lax.broadcasted_iota(np.int32, (self.size,) + (1,) * gradient.ndim, 0) == 0
        return jnp.where(is_first, gradient[None], jnp.zeros_like(gradient)[None])

    def shardings(self, params: Any) -> Any:
        """Return the sharding of every parameter; None without a mesh."""
        return jax.tree.map(lambda _: None, params)

    def add(self, sums: Any) -> Any:
        """Add the groups' sums, [groups, …] to […]."""
        return jax.tree.map(lambda x: x.sum(0), sums)

    def add_to(self, sharding: Any, sums: jax.Array) -> jax.Array:
        """Add the groups' sums of one parameter, [groups, …] to […] of this sharding."""
        del sharding
        return sums.sum(0)
