"""Recompute cheap operations of low-precision values in the backward pass, as PyTorch's kernels do.

A kernel such as PyTorch's gelu or layer_norm keeps its inputs for the backward pass. Differentiated by JAX, the same
formula keeps each factor that it multiplies by, in float32: several times the memory of a low-precision input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxtrain.transforms import jaxpr

RECOMPUTED = "recomputed_in_low_precision"


def recomputed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a pure function of arrays that is cheaper to compute again than to keep its intermediate values.

    Under autocast, and for low-precision inputs, its backward pass keeps its inputs alone and computes it again. In
    float32 and float64 nothing changes.

    Args:
      fn: A pure function of arrays, without matrix products.

    Returns:
      The jitted function, the same one for every call with the same `fn`.

    Example:
      >>> def kept(x):
      ...     _, pull = jax.vjp(recomputed(lambda x: jnp.exp(jnp.sin(x))), x)
      ...     return [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull)]
      >>> kept(jnp.ones(3, jnp.bfloat16))
      [('bfloat16', (3,))]
      >>> len(kept(jnp.ones(3)))
      2
    """
    return jaxpr.jit_once(fn, _mark)


def recompute(fn: Callable[..., Any], args: Sequence[Any], traced: Jaxpr) -> Any:
    """Return `fn(*args)`, of whose intermediate values the backward pass keeps none; `traced` is the jaxpr of `fn`."""
    # XLA would merge the computations of a loop-free program and keep what they share. That is wanted of the few
    # statistics of a norm only.
    return jax.checkpoint(fn, prevent_cse=not _reduces(traced))(*args)


def _reduces(traced: Jaxpr) -> bool:
    return any(
        eqn.primitive.name.startswith("reduce_") or any(map(_reduces, jaxpr.inner_jaxprs(eqn))) for eqn in traced.eqns
    )


def _mark(fn: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed_in_low_precision(*args: Any) -> Any:
        is_low = any(getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16) for x in jax.tree.leaves(args))
        return recompute(fn, args, jax.make_jaxpr(fn)(*args).jaxpr) if is_low else fn(*args)

    return recomputed_in_low_precision
