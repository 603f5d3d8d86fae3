"""Muon with the arithmetic of `torch.optim.Muon` (`torch/optim/_muon.py`).

`optax.contrib.muon` does not decay, averages without the factor 1 − momentum and iterates in the gradient's dtype.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import average, value_at, zeros
from jaxtrain.optim.sgd import MomentumState
from jaxtrain.step import LearningRate, scale_by_learning_rate

_SCALES = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


@optimizer
def muon(
    learning_rate: LearningRate = 1e-3,
    weight_decay: float = 0.1,
    momentum: optax.ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    out_axis: int = -1,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformationExtraArgs:
    """Muon, as `torch.optim.Muon`, for matrices only: `groups` assigns another optimizer to other parameters.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      weight_decay: Decoupled weight decay.
      momentum: Decay of the momentum buffer, or a schedule of it.
      nesterov: Whether to use Nesterov momentum.
      ns_coefficients: Coefficients of the Newton-Schulz iteration.
      eps: Lower bound of the norm that a matrix is divided by.
      ns_steps: Number of Newton-Schulz iterations.
      adjust_lr_fn: "original", "match_rms_adamw" or None: how the rate depends on a matrix's shape.
      out_axis: Axis of a matrix's outputs, 0 or −1. PyTorch's matrices are [out, in], and their rate grows with
        out / in.
      dtype: Dtype of the Newton-Schulz iteration.

    Returns:
      An optax transformation.

    Example:
      >>> tx = muon(0.1, weight_decay=0.0, dtype=jnp.float32)
      >>> updates, _ = tx.update(jnp.eye(2), tx.init(jnp.eye(2)), jnp.eye(2))
      >>> round(float(updates[0, 0]), 2)
      -0.11
    """
    if adjust_lr_fn not in _SCALES:
        raise UserError(f"adjust_lr_fn {adjust_lr_fn!r} is unknown: use 'original' or 'match_rms_adamw'")

    def init(params: Any) -> MomentumState:
        for leaf in jax.tree.leaves(params):
            if leaf.ndim != 2:
                raise UserError(
                    f"muon takes matrices only, got shape {leaf.shape}: put such parameters in another group"
                )
        return MomentumState(jnp.zeros([], np.int32), zeros(params))

    def update(grads: Any, state: MomentumState, params: Any) -> tuple[Any, MomentumState]:
        mu = value_at(momentum, state.count)
        buffer = average(mu, state.momentum_buffer, grads)
        lookahead = average(1 - mu, grads, buffer) if nesterov else buffer

        def direction(x: jax.Array, p: jax.Array) -> jax.Array:
            transposed = jnp.moveaxis(x, out_axis, 0)
            orthogonal = _orthogonalize(transposed.astype(dtype), ns_coefficients, ns_steps, eps).astype(x.dtype)
            scaled = _SCALES[adjust_lr_fn](*transposed.shape) * orthogonal
            return jnp.moveaxis(scaled, 0, out_axis) + weight_decay * p

        return jax.tree.map(direction, lookahead, params), MomentumState(optax.safe_increment(state.count), buffer)

    return optax.chain(optax.GradientTransformation(init, update), scale_by_learning_rate(learning_rate))


def _orthogonalize(x: jax.Array, coefficients: tuple[float, float, float], steps: int, eps: float) -> jax.Array:
    """Bring the singular values of a matrix [m, n] close to 1 by the Newton-Schulz iteration."""
    a, b, c = coefficients
    if x.shape[0] > x.shape[1]:
        return _orthogonalize(x.T, coefficients, steps, eps).T
    x = x / jnp.maximum(_norm(x), eps)
    for _ in range(steps):
        gram = _add_product(None, 0.0, 1.0, x, x.T)
        x = _add_product(x, a, 1.0, _add_product(gram, b, c, gram, gram), x)
    return x


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return jnp.sqrt((wide * wide).sum()).astype(x.dtype)


def _add_product(added: Any, beta: float, alpha: float, left: jax.Array, right: jax.Array) -> jax.Array:
    """Return beta · added + alpha · left @ right, rounded once, as `torch.addmm`."""
    wide = np.promote_types(left.dtype, np.float32)
    product = alpha * jnp.matmul(left, right, precision="highest", preferred_element_type=wide)
    return (product if added is None else beta * added.astype(wide) + product).astype(left.dtype)
