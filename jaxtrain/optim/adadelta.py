"""Adadelta with the arithmetic of `torch.optim.Adadelta` (`torch/optim/adadelta.py`).

The algorithm is optax's, the defaults are PyTorch's.
"""

import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


@optimizer
def adadelta(
    learning_rate: LearningRate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adadelta, as `torch.optim.Adadelta`.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      rho: Decay of the moving averages.
      eps: Added to the averages under the root.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = adadelta()
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -0.003162
    """
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize),
        optax.scale_by_adadelta(rho, eps),
        scale_by_learning_rate(learning_rate),
    )
