"""Mark a loss as one operation of autocast's float32 list, as PyTorch's losses are."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.passes import LOSS, autocast_disabled, widen

P = ParamSpec("P")


def operation(*options: str) -> Callable[[Callable[P, jax.Array]], Callable[P, jax.Array]]:
    """Mark a pure function as one float32 operation under autocast.

    Autocast widens its low-precision inputs once and runs it in float32, and its gradients are rounded once
    (`AT_FORALL_FP32` in `aten/src/ATen/autocast_mode.h` lists PyTorch's). Otherwise low-precision inputs are widened as
    well and the result is rounded once, as by PyTorch's kernels; the policy `bf16_compute` leaves it in float32.

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
        @functools.wraps(fn)
        def rounded_once(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
            wide_args, wide_kwargs = jax.tree.map(widen, (args, kwargs))
            out = fn(*wide_args, **wide_kwargs)
            floats = [x.dtype for x in jax.tree.leaves((args, kwargs)) if _is_float_array(x)]
            return out.astype(jnp.result_type(*floats)) if floats else out

        jitted = jax.jit(rounded_once, static_argnames=options)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
            with autocast_disabled(), jax.named_scope(LOSS):
                out: jax.Array = jitted(*args, **kwargs)
                return out

        return call

    return decorate


def _is_float_array(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.int32), np.floating)
