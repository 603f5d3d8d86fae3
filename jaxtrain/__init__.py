"""Training in JAX as pure jitted step functions."""

from jaxtrain.batch_size import EffectiveBatch
from jaxtrain.errors import UserError
from jaxtrain.hooks import hook
from jaxtrain.loss_scale import dynamic_loss_scale, static_loss_scale
from jaxtrain.nonfinite import leaf_name
from jaxtrain.objective import Loss
from jaxtrain.precision import Policy, autocast, autocast_disabled, kernel
from jaxtrain.remat import block
from jaxtrain.step import TrainState, TrainStep, eval_step, train_step

__version__ = "0.1.0"

__all__ = [
    "EffectiveBatch",
    "Loss",
    "Policy",
    "TrainState",
    "TrainStep",
    "UserError",
    "autocast",
    "autocast_disabled",
    "block",
    "dynamic_loss_scale",
    "eval_step",
    "hook",
    "kernel",
    "leaf_name",
    "static_loss_scale",
    "train_step",
]
