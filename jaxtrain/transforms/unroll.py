"""Unroll the scans over a model's layers.

A model scans over identical layers, so that only one of them is compiled, whatever its depth. At run time this costs a
copy of every value that the backward pass needs into an array for all layers, and out of it again. `unroll(fn)`
takes longer to compile, runs faster and computes the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.platform import is_gpu
from jaxtrain.transforms.remat import BLOCK


def unroll(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Unroll the scans over marked blocks; other scans are left as they are.

    Between unrolled layers on a GPU, activations keep the layout that they have between the steps of a loop, features
    last. XLA would choose it by the sum over 32 rows or more that is the gradient of a position embedding, rows last:
    every norm would then reduce along a middle axis, and every product would start with a transpose.

    Args:
      fn: A function that scans over blocks marked by `jaxtrain.block`.
      platform: The platform that it is compiled for; None for that of the default backend.

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

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        if eqn.primitive.name == "scan" and _has_block(eqn.params["jaxpr"].jaxpr):
            return jaxpr.unroll_scan(eqn, args, run, _features_last if is_gpu(platform) else None)
        return None

    return jaxpr.transform(fn, rule)


def _features_last(x: Any) -> Any:
    is_activation = jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if is_activation else x


def _has_block(traced: Jaxpr) -> bool:
    return any(
        jaxpr.is_call(eqn, BLOCK) or any(_has_block(inner) for inner in jaxpr.inner_jaxprs(eqn)) for eqn in traced.eqns
    )
