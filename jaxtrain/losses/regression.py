"""Losses for regression, per element."""

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.losses.operation import operation
from jaxtrain.losses.shapes import require_alike
from jaxtrain.losses.subgradients import abs


@operation()
def mse(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """Squared error (p − t)², as `torch.nn.functional.mse_loss(reduction="none")`. optax has a factor of ½.

    Args:
      predictions: float[...].
      targets: float[...], the same shape.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
      >>> mse(jnp.array([3.0]), jnp.array([1.0])).tolist()
      [4.0]
    """
    require_alike(predictions=predictions, targets=targets)
    return jnp.square(predictions - targets)


@operation()
def l1(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """Absolute error |p − t|, as `torch.nn.functional.l1_loss(reduction="none")`; its gradient at 0 is 0.

    Args:
      predictions: float[...].
      targets: float[...], the same shape.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
      >>> l1(jnp.array([3.0]), jnp.array([1.0])).tolist()
      [2.0]
    """
    require_alike(predictions=predictions, targets=targets)
    return abs(predictions - targets)


@operation("beta")
def smooth_l1(predictions: jax.Array, targets: jax.Array, *, beta: float = 1.0) -> jax.Array:
    """Smooth L1 loss, as `torch.nn.functional.smooth_l1_loss(reduction="none")`.

    d² / 2β for d = |p − t| below β, else d − β/2: Huber's loss over β, and `l1` if β is 0.

    Args:
      predictions: float[...].
      targets: float[...], the same shape.
      beta: Threshold β, at least 0.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ, or `beta` is negative.

    Example:
      >>> smooth_l1(jnp.array([3.0]), jnp.array([1.0]), beta=0.5).tolist()
      [1.75]
    """
    if beta < 0:
        raise UserError(f"beta must be at least 0, got {beta}: use 0 for l1")
    if beta == 0:
        return l1(predictions, targets)
    return huber(predictions, targets, delta=beta) / beta


@operation("delta")
def huber(predictions: jax.Array, targets: jax.Array, *, delta: float = 1.0) -> jax.Array:
    """Huber's loss, as `torch.nn.functional.huber_loss(reduction="none")`.

    d² / 2 for d = |p − t| up to δ, else δ (d − δ/2).

    Args:
      predictions: float[...].
      targets: float[...], the same shape.
      delta: Threshold δ, positive.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ, or `delta` is not positive.

    Example:
      >>> huber(jnp.array([3.0]), jnp.array([1.0]), delta=0.5).tolist()
      [0.875]
    """
    if delta <= 0:
        raise UserError(f"delta must be positive, got {delta}: use 1.0")
    require_alike(predictions=predictions, targets=targets)
    error = predictions - targets
    size = abs(error)
    near = size <= delta
    # The unselected square of an infinite error would make its gradient NaN.
    return jnp.where(near, 0.5 * jnp.square(jnp.where(near, error, 0)), delta * (size - 0.5 * delta))
