"""Groups of a micro-batch's rows, and parameters whose gradients are partial sums, one for each group."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed


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


OF_SUMS = op.LAYOUT - {op.NAME} | {op.CONVERT_ELEMENT_TYPE}  # a policy of rematerialization would save named sums too


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial(Followed):
    """A parameter whose gradient is computed as partial sums.

    Attributes:
      value: The parameter.
      sums: Zeros, [groups, …]: the gradient of the result by them is the partial sums.
      groups: The groups.
    """

    value: jax.Array
    sums: jax.Array
    groups: Groups = field(metadata={"static": True})

    def used(self) -> Any:
        """Return the value; its gradient is added to the groups' sums."""

        @jax.custom_vjp
        def value(x: jax.Array, sums: jax.Array) -> jax.Array:
            del sums
            return x

        value.defvjp(lambda x, sums: (x, None), lambda _, gradient: (None, self.groups.place(gradient)))
        return value(self.value, self.sums)

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> "Partial | None":
        """Return the parameter and its sums in another layout or dtype."""
        name = op.of(eqn)
        if name == op.SHARDING_CONSTRAINT:
            return replace(self, value=apply(self.value), sums=self.groups.shard(self.sums, equations.sharding(eqn)))
        if name not in OF_SUMS and (name not in (op.BROADCAST_IN_DIM, op.GATHER) or _is_larger(eqn)):
            return None
        by_group = jax.vmap(apply, spmd_axis_name=self.groups.axes)
        return replace(self, value=apply(self.value), sums=by_group(self.sums))

    def to_slice(self) -> "Partial":
        """Return the parameter with sums [layers, groups, …]."""
        return replace(self, sums=jnp.moveaxis(self.sums, 0, 1))


def _is_larger(eqn: JaxprEqn) -> bool:
    """Return whether a broadcast or a lookup repeats values: partial sums would be repeated too."""
    sizes = [v.aval.size for v in (eqn.invars[0], eqn.outvars[0])]  # type: ignore[attr-defined]
    return bool(sizes[0] < sizes[1])
