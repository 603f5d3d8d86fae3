"""The sums of a window, added over groups within the backward pass of its last micro-batch.

After the last micro-batch, no product is left that could run while devices add their sums. The gradient of each layer's
last micro-batch is therefore added to the layer's earlier ones, and to those of the other devices, in the scan over
layers backwards: XLA adds the sums of one layer while it computes the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.passes.marks import GATHERED_COPY
from jaxtrain.passes.mesh.gradient_groups import Groups, Partial
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, uses


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LastPartial(Followed):
    """A parameter in the last micro-batch of a window, by which the gradient is the sum of the whole window.

    Attributes:
      value: The parameter.
      total: Zeros, […]: the gradient by them is the weighted sum of the window's gradients, added over groups.
      nonfinite: Zeros, [groups]: not zero in the gradient where the last micro-batch's is not finite.
      earlier: The weighted partial sums of the earlier micro-batches, [groups, …].
      weight: The weight of the last micro-batch's gradient.
      groups: The groups.
      sharding: The sharding of the parameter; None without a mesh.
    """

    value: jax.Array
    total: jax.Array
    nonfinite: jax.Array
    earlier: jax.Array
    weight: jax.Array
    groups: Groups = field(metadata={"static": True})
    sharding: Any = field(metadata={"static": True})

    def used(self) -> Any:
        """As `Partial.used`."""
        return self.sliced().used()

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> "LastPartial | None":
        """Return the parameter with a constraint of its sharding."""
        return replace(self, value=apply(self.value)) if op.of(eqn) == op.SHARDING_CONSTRAINT else None

    def is_scanned(self, jaxpr: Jaxpr, variable: Any) -> bool:
        """Return whether the only use of the parameter is that a scan takes slices of it, which devices share like it.

        Args:
          jaxpr: The program.
          variable: The parameter in it.
        """
        x, sharding = self.value, self.sharding
        if x.ndim == 0 or (sharding is not None and sharding.shard_shape(x.shape)[0] < len(x)):
            return False
        found = uses(jaxpr, variable, _keeps, lambda eqn, _: op.of(eqn) in op.CALLS)
        return [use.eqn is not None and _slices(use.eqn, use.position) for use in found] == [True]

    def to_slice(self) -> "LastPartial":
        """Return a parameter [layers, …] whose slices are the parameters of layers."""
        n, sharding = len(self.value), self.sharding
        return replace(
            self,
            nonfinite=jnp.broadcast_to(self.nonfinite, (n, *self.nonfinite.shape)),
            earlier=jnp.moveaxis(self.earlier, 0, 1),
            weight=jnp.broadcast_to(self.weight, (n,)),
            sharding=None if sharding is None else NamedSharding(sharding.mesh, P(*sharding.spec[1:])),
        )

    def sliced(self) -> Partial:
        """Return a parameter whose partial sums are added to the earlier ones and over groups in the backward pass."""
        groups, dtype = self.groups, self.value.dtype

        @jax.custom_vjp
        def sums(total: jax.Array, nonfinite: jax.Array, earlier: jax.Array, weight: jax.Array) -> jax.Array:
            del total, nonfinite, weight
            return groups.shard(jnp.zeros(earlier.shape, dtype))

        def forward(
            total: jax.Array, nonfinite: jax.Array, earlier: jax.Array, weight: jax.Array
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            return sums(total, nonfinite, earlier, weight), (earlier, weight)

        def backward(residuals: tuple[jax.Array, jax.Array], last: jax.Array) -> tuple[Any, ...]:
            earlier, weight = residuals
            last = groups.shard(last.astype(earlier.dtype))
            nonfinite = groups.shard(~jnp.isfinite(last).all(range(1, last.ndim)))
            added = earlier + last * weight.astype(last.dtype)
            return groups.add_to(self.sharding, added), nonfinite.astype(earlier.dtype), None, None

        sums.defvjp(forward, backward)
        return Partial(self.value, sums(self.total, self.nonfinite, self.earlier, self.weight), groups)


def is_partial(x: Any) -> bool:
    """Return whether a node of a pytree is a parameter with partial sums."""
    return isinstance(x, Partial | LastPartial)


def _slices(eqn: JaxprEqn, i: int) -> bool:
    """Return whether an equation is a scan that slices operand i."""
    return op.of(eqn) == op.SCAN and i >= sum(equations.scan_sizes(eqn))


def _keeps(eqn: JaxprEqn, i: int) -> bool:
    """Return whether an equation only constrains the sharding of a parameter, or takes its gathered copy."""
    del i
    return op.of(eqn) == op.SHARDING_CONSTRAINT or equations.is_call(eqn, GATHERED_COPY)
