"""Losses of regressions, element by element."""

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.losses.operation import operation
from jaxtrain.losses.shapes import require_alike
from jaxtrain.losses.subgradients import abs


@operation()
def mse(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """`torch.nn.functional.mse_loss(reduction="none")`: (p − t)², without optax's ½. All shapes [...].

    >>> mse(jnp.array([3.0]), jnp.array([1.0])).tolist()
    [4.0]
    """
    require_alike(predictions=predictions, targets=targets)
    return jnp.square(predictions - targets)


@operation()
def l1(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """`torch.nn.functional.l1_loss(reduction="none")`: |p − t|, whose gradient at 0 is 0. All shapes [...].

    >>> l1(jnp.array([3.0]), jnp.array([1.0])).tolist()
    [2.0]
    """
    require_alike(predictions=predictions, targets=targets)
    return abs(predictions - targets)


@operation("beta")
def smooth_l1(predictions: jax.Array, targets: jax.Array, *, beta: float = 1.0) -> jax.Array:
    """`torch.nn.functional.smooth_l1_loss(reduction="none")`: d² / 2β where d = |p − t| is under β, else d − β/2.

    Huber's loss over β, and `l1` where β is 0. All shapes [...]. Raises `UserError` for a negative β.

    >>> smooth_l1(jnp.array([3.0]), jnp.array([1.0]), beta=0.5).tolist()
    [1.75]
    """
    if beta < 0:
        raise UserError(f"beta {beta} of smooth_l1 is negative: choose 0, which is l1, or more")
    if beta == 0:
        return l1(predictions, targets)
    return huber(predictions, targets, delta=beta) / beta


@operation("delta")
def huber(predictions: jax.Array, targets: jax.Array, *, delta: float = 1.0) -> jax.Array:
    """`torch.nn.functional.huber_loss(reduction="none")`: d² / 2 where d = |p − t| is up to δ, else δ (d − δ/2).

    All shapes [...]. Raises `UserError` for a δ that is not positive.

    >>> huber(jnp.array([3.0]), jnp.array([1.0]), delta=0.5).tolist()
    [0.875]
    """
    if delta <= 0:
        raise UserError(f"delta {delta} of huber is not positive: choose one that is")
    require_alike(predictions=predictions, targets=targets)
    error = predictions - targets
    size = abs(error)
    return jnp.where(size <= delta, 0.5 * jnp.square(error), delta * (size - 0.5 * delta))
