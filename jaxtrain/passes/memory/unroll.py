"""Unroll the scans over a model's layers.

A model scans over identical layers, so that only one of them is compiled, whatever its depth. At run time this costs a
copy of every value that the backward pass needs into an array for all layers, and out of it again. `unroll(fn)`
takes longer to compile, runs faster and computes the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.passes.fp8.scales import E4M3, E5M2
from jaxtrain.passes.memory.remat import BLOCK
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.platform import is_gpu

_EIGHT_BITS = (E4M3, E5M2)


def unroll(fn: Callable[..., Any], platform: str | None = None, *, on_mesh: bool = False) -> Callable[..., Any]:
    """Unroll the scans over marked blocks; other scans are left as they are.

    Between unrolled layers on a GPU, activations keep the layout that they have between the steps of a loop, features
    last. XLA would choose it by the sum over 32 rows or more that is the gradient of a position embedding, rows last:
    every norm would then reduce along a middle axis, and every product would start with a transpose.

    On a mesh of GPUs, the compiler would gather whole activations to choose their layout. There, the parameters of a
    layer are instead gathered no earlier than the layer before it starts, and its gradients are reduced before the
    backward pass reaches the second layer before it, so that both transfers run beside one layer.

    Args:
      fn: A function that scans over blocks marked by `jaxtrain.block`.
      platform: The platform that it is compiled for; None for that of the default backend.
      on_mesh: Whether the compiler divides the function among the devices of a mesh.

    Returns:
      The same function with each of these scans evaluated step by step.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxtrain import block
      >>> def layers(x):
      ...     return jax.lax.scan(lambda x, _: (block(jnp.sin)(x), None), x, None, length=3)[0]
      >>> text = str(jax.make_jaxpr(unroll(layers))(1.0))
      >>> text.count("scan["), text.count("name=remat_block")
      (0, 3)
    """

    on_gpu = _transfers_beside_a_layer if on_mesh else _features_last
    between = on_gpu if is_gpu(platform) else None

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        if op.of(eqn) == op.SCAN and _has_block(equations.body(eqn).jaxpr):
            return rewrite.unroll_scan(eqn, args, run, between)
        return None

    return rewrite.transform(fn, rule)


def _features_last(carry: list[Any], following: list[Any]) -> tuple[list[Any], list[Any]]:
    def of(x: Any) -> Any:
        is_activation = _is_floating(x) and x.ndim > 1
        return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if is_activation else x

    # XLA would convert the kernels of all layers as one array (SliceSinker), and multiply in 16 bits.
    return list(map(of, carry)), [lax.optimization_barrier(x) if x.dtype in _EIGHT_BITS else x for x in following]


def _transfers_beside_a_layer(carry: list[Any], following: list[Any]) -> tuple[list[Any], list[Any]]:
    """Make the activations and the next layer's parameters depend on each other; in the backward pass, gradients."""
    both = [*carry, *following]
    ordered = iter(lax.optimization_barrier([x for x in both if _is_floating(x)]))
    both = [next(ordered) if _is_floating(x) else x for x in both]
    return both[: len(carry)], both[len(carry) :]


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _has_block(traced: Jaxpr) -> bool:
    return any(equations.is_call(eqn, BLOCK) for eqn in equations.visit(traced))
