"""Training in JAX as pure jitted step functions."""

from jaxtrain.errors import UserError
from jaxtrain.loss_scale import dynamic_loss_scale, static_loss_scale
from jaxtrain.objective import Loss
from jaxtrain.precision import Policy, autocast
from jaxtrain.remat import block
from jaxtrain.step import TrainState, TrainStep, eval_step, train_step

__version__ = "0.1.0"

__all__ = [
    "Loss",
    "Policy",
    "TrainState",
    "TrainStep",
    "UserError",
    "autocast",
    "block",
    "dynamic_loss_scale",
    "eval_step",
    "static_loss_scale",
    "train_step",
]
