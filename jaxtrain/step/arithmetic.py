"""How the step runs an optimizer: in float32 arithmetic, whatever its parameters and its state are kept in.

In float16 the eps of Adam and RMSprop is 0, so that a gradient of 0 becomes 0/0 (PyTorch's fused kernels compute in
float32 for the same reason, `aten/src/ATen/native/cuda/fused_adam_utils.cuh`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, its low-precision inputs and state widened before, its state rounded back once after.

    Updates are float32. What is float32 or float64 is untouched. optax relies on JAX's ordinary promotion: it is in
    force inside, whatever the caller's mode.

    >>> adam = in_float32(optax.adam(0.1))
    >>> params = jnp.ones(1, np.float16)
    >>> updates, state = adam.update(jnp.zeros(1, np.float16), adam.init(params), params)
    >>> abs(float(updates[0])), state[0].mu.dtype.name
    (0.0, 'float16')
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, new = optimizer.update(wide(grads), wide(state), wide(params), **extra)
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype) if _is_low(old) else x, new, state)

    return optax.GradientTransformationExtraArgs(_permissive(optimizer.init), _permissive(update))


def wide(tree: Any) -> Any:
    """`tree` with its low-precision leaves in float32."""
    return jax.tree.map(lambda x: x.astype(np.float32) if _is_low(x) else x, tree)


def _is_low(x: Any) -> bool:
    return getattr(x, "dtype", None) in (np.float16, jnp.bfloat16)


def _permissive(fn: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return called
