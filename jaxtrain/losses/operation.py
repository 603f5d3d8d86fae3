"""Mark a loss as one operation of autocast's float32 list, as PyTorch's losses are."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import jax

from jaxtrain.transforms import autocast_disabled

P = ParamSpec("P")


def operation(*options: str) -> Callable[[Callable[P, jax.Array]], Callable[P, jax.Array]]:
    """Mark a pure function as one float32 operation under autocast.

    Autocast widens its low-precision inputs once and runs it in float32, and its gradients are rounded once
    (`AT_FORALL_FP32` in `aten/src/ATen/autocast_mode.h` lists PyTorch's). Otherwise it runs in its inputs' dtype.

    Args:
      *options: Names of the arguments that are Python numbers; all others are arrays.

    Returns:
      A decorator.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain import autocast
      >>> @operation("factor")
      ... def scaled(x, factor):
      ...     return factor * x
      >>> autocast(lambda x: scaled(x @ x, factor=3.0), jnp.bfloat16)(jnp.ones((2, 2))).dtype.name
      'float32'
    """

    def decorate(fn: Callable[P, jax.Array]) -> Callable[P, jax.Array]:
        jitted = jax.jit(fn, static_argnames=options)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
            with autocast_disabled():
                out: jax.Array = jitted(*args, **kwargs)
                return out

        return call

    return decorate
