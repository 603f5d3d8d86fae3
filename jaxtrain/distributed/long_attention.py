"""Long attention on a mesh that divides tokens: by a ring of devices, or by heads for cuDNN's kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxtrain.distributed.constraints import ShardingConstraints
from jaxtrain.distributed.ring import Attention, is_ring, ring_attention
from jaxtrain.models.attention import FORWARD, cudnn
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.primitives import fused_attention
from jaxtrain.passes import low_operation
from jaxtrain.program import equations
from jaxtrain.program import operations as op


def find_attention(eqn: JaxprEqn) -> tuple[Options, tuple[str, ...]] | None:
    """Return the options of long attention, and the names of its operands; None for every other operation."""
    traced = equations.inner_jaxprs(eqn) if op.of(eqn) in op.CALLS else []
    # Attention is marked for autocast, which would compute it anew, undivided, if the mark stayed.
    marked = equations.sole(traced[0]) if len(traced) == 1 else None
    if marked is None or op.of(marked) != op.CUSTOM_VJP_CALL or marked.invars != traced[0].invars:
        return None
    forward = equations.sole(equations.body(marked))
    if forward is None or op.of(forward) != FORWARD.name:
        return None
    options = {**equations.params(forward)}
    given = options.pop("given")
    return Options(**options), given


@functools.cache
def divided_attention(
    options: Options, given: tuple[str, ...], constraints: ShardingConstraints, on_gpu: bool
) -> Callable[..., jax.Array]:
    """Return attention of queries, keys, values and operands with a computation for a mesh that divides their tokens.

    It is one operation of autocast's low-precision list. Which computation it has depends on the dtype that it gets.

    Args:
      options: What is computed.
      given: Names of the operands.
      constraints: The sharding constraints of the program's activations.
      on_gpu: Whether the devices are GPUs.
    """

    def attend(*arrays: jax.Array) -> jax.Array:
        q, k, v, *others = arrays
        attention = Attention(options, q, k, v, Operands.joined(given, others)[0])
        has_kernel = on_gpu and q.dtype in cudnn.LOW and cudnn.is_supported(*attention)
        is_in_ring = is_ring(attention, constraints.mesh)
        if has_kernel and (constraints.divides_heads(arrays) or not is_in_ring):
            (out,) = constraints.run_fused(undivided, arrays)
            return out
        return ring_attention(attention, constraints.mesh) if is_in_ring else undivided(*arrays)[0]

    def undivided(q: Any, k: Any, v: Any, *others: Any) -> list[jax.Array]:
        return [fused_attention(options, q, k, v, Operands.joined(given, others)[0])]

    return low_operation(attend)
