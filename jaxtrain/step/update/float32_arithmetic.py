"""The optimizer's arithmetic is float32, whatever dtype its parameters and its state are stored in.

In float16 the eps of Adam and RMSprop is 0, so that a zero gradient becomes 0/0. PyTorch's fused kernels compute in
float32 for the same reason (`aten/src/ATen/native/cuda/fused_adam_utils.cuh`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.step.update.optimizer_calls import call_init, call_update


def optimizer_in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Compute an optimizer's updates in float32 and round its state back to its dtype once.

    float32 and float64 inputs are unchanged. optax relies on JAX's standard promotion, which is in force inside
    whatever the caller's mode.

    Args:
      optimizer: An optax transformation.

    Returns:
      A transformation with the same state, whose updates are float32 for low-precision inputs.

    Example:
      >>> adam = optimizer_in_float32(optax.adam(0.1))
      >>> params = jnp.ones(1, np.float16)
      >>> updates, state = adam.update(jnp.zeros(1, np.float16), adam.init(params), params)
      >>> abs(float(updates[0])), state[0].mu.dtype.name
      (0.0, 'float16')
    """

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, new = call_update(optimizer, widen(grads), widen(state), widen(params), extra)
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype) if _is_low(old) else x, new, state)

    return optax.GradientTransformationExtraArgs(
        _with_standard_promotion(partial(call_init, optimizer)), _with_standard_promotion(update)
    )


def widen(tree: Any) -> Any:
    """Convert the low-precision leaves of `tree` to float32."""
    return jax.tree.map(lambda x: x.astype(np.float32) if _is_low(x) else x, tree)


def _is_low(x: Any) -> bool:
    return getattr(x, "dtype", None) in (np.float16, jnp.bfloat16)


def _with_standard_promotion(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return call
