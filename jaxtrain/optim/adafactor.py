"""Adafactor with the arithmetic of `torch.optim.Adafactor` (`torch/optim/_adafactor.py`).

`optax.adafactor` is a different algorithm: its decay, factors and clipping differ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import rate_at


class AdafactorState(NamedTuple):
    """State of `adafactor`. Entries that a leaf does not use are arrays without elements.

    Attributes:
      count: int32[], updates so far.
      learning_rate: float[], the scheduler's rate at the last update.
      row_var: [.., m, 1], row factor of a matrix's second moment.
      col_var: [.., 1, n], column factor of a matrix's second moment.
      variance: Second moment of a vector.
    """

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array
    row_var: Any
    col_var: Any
    variance: Any


@optimizer
def adafactor(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adafactor, as `torch.optim.Adafactor`: steps relative to a parameter's RMS, second moments factored.

    The last two axes of a parameter are factored; transposing a matrix changes nothing. A convolution's last two axes
    differ between the layouts of JAX and PyTorch, and layers stacked in one array share one RMS: for these the result
    is Adafactor, but not that of PyTorch.

    Args:
      learning_rate: A number, or a schedule of the number of updates.
      beta2_decay: Exponent of the second moment's decay.
      eps: Bounds (of the squared update, of the parameter's RMS); None for the dtype's epsilon.
      d: Threshold of the update's RMS.
      weight_decay: Decoupled weight decay.
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adafactor(0.1)
      >>> params = jnp.ones((2, 3))
      >>> updates, _ = tx.update(jnp.full((2, 3), 3.0), tx.init(params), params)
      >>> round(float(updates[0, 0]), 6)
      -0.1
    """

    def init(params: Any) -> AdafactorState:
        def factor(axis: int) -> Any:
            return jax.tree.map(lambda p: _mean_square(jnp.zeros_like(p), axis) if p.ndim > 1 else _empty(p), params)

        variance = jax.tree.map(lambda p: _empty(p) if p.ndim > 1 else jnp.zeros_like(p), params)
        zero = jnp.zeros([], np.int32)
        return AdafactorState(zero, rate_at(learning_rate, zero), factor(-1), factor(-2), variance)

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        lr = rate_at(learning_rate, state.count)
        count = optax.safe_increment(state.count)
        t = count.astype(lr.dtype)
        weight = t**beta2_decay

        def interpolate(old: jax.Array, new: jax.Array) -> jax.Array:
            return old + weight.astype(old.dtype) * (new - old)

        def factor(old: Any, axis: int) -> Any:
            return jax.tree.map(lambda v, g: interpolate(v, _mean_square(g, axis)) if g.ndim > 1 else v, old, grads)

        row, col = factor(state.row_var, -1), factor(state.col_var, -2)
        variance = jax.tree.map(lambda v, g: v if g.ndim > 1 else interpolate(v, g * g), state.variance, grads)

        def change(g: jax.Array, p: jax.Array, r: jax.Array, c: jax.Array, v: jax.Array) -> jax.Array:
            eps1 = float(jnp.finfo(p.dtype).eps) if eps[0] is None else eps[0]
            if g.ndim > 1:
                v = r * jnp.broadcast_to(c, g.shape) / jnp.maximum(r.mean(-2, keepdims=True), eps1)
            direction = g / jnp.sqrt(jnp.maximum(v, eps1 * eps1))
            step = jnp.maximum(eps[1], _rms(p)) * jnp.minimum(lr, 1 / jnp.sqrt(t)).astype(p.dtype)
            decay = lr.astype(p.dtype) * weight_decay
            return -(step / jnp.maximum(1.0, _rms(direction) / d)) * direction - decay * p

        updates = jax.tree.map(change, grads, params, row, col, variance)
        return updates, AdafactorState(count, lr, row, col, variance)

    return optax.chain(*gradient_preprocessing(0.0, maximize), optax.GradientTransformation(init, update))


def _mean_square(x: jax.Array, axis: int) -> jax.Array:
    return (x * x).mean(axis, keepdims=True)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt((x * x).mean())


def _empty(p: jax.Array) -> jax.Array:
    return jnp.zeros([0], p.dtype)
