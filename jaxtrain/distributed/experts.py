"""Sparse mixtures of experts on a mesh: every device sorts its own tokens, and exchanges them along `expert`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.constraints import ShardingConstraints
from jaxtrain.distributed.exchange import Exchange
from jaxtrain.distributed.mesh import EXPERT, TENSOR
from jaxtrain.models.routed_experts import Experts, compute_sorted, in_order, sort_by_expert
from jaxtrain.passes import low_operation


@functools.cache
def divided_experts(experts: Experts, constraints: ShardingConstraints, on_gpu: bool) -> Callable[..., jax.Array]:
    """Return `routed_experts` of `experts` as a function of (x, chosen, *params) for a mesh that divides its rows.

    It is one operation of autocast's low-precision list, so that tokens are exchanged, and parameters gathered, in the
    dtype of the products.

    Args:
      experts: Applies the experts to sorted tokens.
      constraints: The sharding constraints of the program's activations.
      on_gpu: Whether the devices are GPUs.
    """
    mesh = constraints.mesh

    def of_device(x: jax.Array, chosen: jax.Array, *params: jax.Array) -> jax.Array:
        n = mesh.shape.get(EXPERT, 1)
        if n == 1:
            return compute_sorted(experts, x, chosen, *params)
        own = params[0].shape[0]
        rows, order, group_sizes = sort_by_expert(x, chosen, n * own)
        k = chosen.shape[-1]
        exchange = Exchange(EXPERT, n, len(rows), len(rows) // k * min(k, own), on_gpu)
        sizes = lax.all_gather(group_sizes, EXPERT)
        of_own = lax.dynamic_slice_in_dim(sizes.sum(0, dtype=sizes.dtype), lax.axis_index(EXPERT) * own, own)
        outputs = experts(exchange.dispatch(rows, sizes), of_own, *params)
        return in_order(exchange.combine(outputs, sizes), order, chosen.shape)

    def divided(x: jax.Array, chosen: jax.Array, *params: jax.Array) -> jax.Array:
        tokens = constraints.token_spec(x)
        options: dict[str, Any] = {"in_specs": (tokens, tokens, *[P(EXPERT)] * len(params)), "out_specs": tokens}
        # The compiler divides the matrices of an expert over `tensor`.
        axes = frozenset(axis for axis, size in mesh.shape.items() if axis != TENSOR or size == 1)
        if all(mesh.shape[axis] == 1 for axis in axes):  # XLA:GPU refuses collectives of one device that are not manual
            return of_device(x, chosen, *params)
        return jax.jit(jax.shard_map(of_device, mesh=mesh, axis_names=axes, check_vma=False, **options))(
            x, chosen, *params
        )

    return low_operation(divided)
