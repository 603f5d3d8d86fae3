"""The training step: scale, differentiate, accumulate, unscale, check, clip, update."""

from jaxtrain.step.accumulate import split
from jaxtrain.step.arithmetic import in_float32
from jaxtrain.step.clip import clip_grad_norm, clip_grad_value
from jaxtrain.step.learning_rate import (
    LearningRate,
    descend,
    rate_at,
    scale_by_learning_rate,
    used_learning_rate,
    used_learning_rates,
)
from jaxtrain.step.loss_scale import (
    LossScaleState,
    consecutive,
    current_scale,
    dynamic_loss_scale,
    load_state_dict,
    state_dict,
    static_loss_scale,
)
from jaxtrain.step.nonfinite import finite_leaves, leaf_name
from jaxtrain.step.objective import Loss, LossFn, checked
from jaxtrain.step.retrace import budgeted
from jaxtrain.step.step import Step, TrainState, TrainStep, applied, eval_step, makes, micro_batch_key, train_step

__all__ = [
    "LearningRate",
    "Loss",
    "LossFn",
    "LossScaleState",
    "Step",
    "TrainState",
    "TrainStep",
    "accumulate",
    "applied",
    "budgeted",
    "checked",
    "clip_grad_norm",
    "clip_grad_value",
    "consecutive",
    "current_scale",
    "descend",
    "dynamic_loss_scale",
    "eval_step",
    "finite_leaves",
    "in_float32",
    "leaf_name",
    "load_state_dict",
    "makes",
    "micro_batch_key",
    "rate_at",
    "scale_by_learning_rate",
    "split",
    "state_dict",
    "static_loss_scale",
    "step",
    "train_step",
    "used_learning_rate",
    "used_learning_rates",
]
