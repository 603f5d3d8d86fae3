"""PyTorch's optimizers, said in optax."""

from jaxtrain.optim.adamw import adamw, scale_by_adam
from jaxtrain.optim.learning_rate import scale_by_learning_rate, used_learning_rate

__all__ = ["adamw", "scale_by_adam", "scale_by_learning_rate", "used_learning_rate"]
