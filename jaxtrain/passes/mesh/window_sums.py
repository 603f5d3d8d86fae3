"""The sums of a window, added over groups within the backward pass of its last micro-batch.

After the last micro-batch, no product is left that could run while devices add their sums. The gradient of each layer's
last micro-batch is therefore added to the layer's earlier ones, and to those of the other devices, in the scan over
layers backwards: XLA adds the sums of one layer while it computes the next.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.passes.marks import GATHERED_COPY
from jaxtrain.passes.mesh.groups import Groups, LastPartial, Partial
from jaxtrain.program import equations


def is_scanned(x: LastPartial, jaxpr: Jaxpr, variable: Any) -> bool:
    """Return whether the only use of a parameter is that a scan takes slices of it, which devices share like it."""
    if x.value.ndim == 0 or (x.sharding is not None and x.sharding.shard_shape(x.value.shape)[0] < len(x.value)):
        return False
    return _is_only_scanned(jaxpr, variable)


def _is_only_scanned(jaxpr: Jaxpr, variable: Any) -> bool:
    uses = [(eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.invars) if v is variable]
    if len(uses) != 1 or any(v is variable for v in jaxpr.outvars):
        return False
    ((eqn, i),) = uses
    name = eqn.primitive.name
    if name == "scan":
        return bool(i >= sum(equations.scan_sizes(eqn)))
    if name == "sharding_constraint" or equations.is_call(eqn, GATHERED_COPY):
        return _is_only_scanned(jaxpr, eqn.outvars[0])
    if name in ("jit", "pjit"):
        body = equations.body(eqn).jaxpr
        return _is_only_scanned(body, body.invars[i])
    return False


def of_layers(x: LastPartial) -> LastPartial:
    """Return a parameter [layers, …] such that a scan takes slices of it, which are the parameters of layers."""
    n, sharding = len(x.value), x.sharding
    return dataclasses.replace(
        x,
        nonfinite=jnp.broadcast_to(x.nonfinite, (n, *x.nonfinite.shape)),
        earlier=jnp.moveaxis(x.earlier, 0, 1),
        weight=jnp.broadcast_to(x.weight, (n,)),
        sharding=None if sharding is None else NamedSharding(sharding.mesh, P(*sharding.spec[1:])),
    )


def with_window_sums(x: LastPartial, of_rows: Groups) -> Partial:
    """Return a parameter whose partial sums are added to the earlier ones and over groups in the backward pass."""
    groups, dtype = of_rows.of_sums(x.earlier), x.value.dtype

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
        return groups.add_to(x.sharding, added), nonfinite.astype(earlier.dtype), None, None

    sums.defvjp(forward, backward)
    return Partial(x.value, sums(x.total, x.nonfinite, x.earlier, x.weight))
