"""PyTorch's optimizers, said in optax."""

from jaxtrain.optim.adamw import adamw, scale_by_adam

__all__ = ["adamw", "scale_by_adam"]
