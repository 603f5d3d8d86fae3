"""The training step: scale, differentiate, accumulate, unscale, check, clip, update, rescale.

`step.py` is the algorithm, `build.py` defines `train_step`, `loss_program.py` lists the transforms of the loss.
"""

from jaxtrain.step.accumulate import split_batch
from jaxtrain.step.arithmetic import optimizer_in_float32
from jaxtrain.step.build import TrainStep, train_step
from jaxtrain.step.clip import clip_grad_norm, clip_grad_value
from jaxtrain.step.evaluation import eval_step
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
    consecutive_skips,
    current_scale,
    dynamic_loss_scale,
    load_state_dict,
    state_dict,
    static_loss_scale,
)
from jaxtrain.step.nonfinite import finite_leaves, leaf_name
from jaxtrain.step.objective import Loss, LossFn, validated
from jaxtrain.step.retrace import limit_recompilation
from jaxtrain.step.state import TrainState, applied_updates, is_factory, micro_batch_key
from jaxtrain.step.step import Step, init_state, window_step

__all__ = [
    "LearningRate",
    "Loss",
    "LossFn",
    "LossScaleState",
    "Step",
    "TrainState",
    "TrainStep",
    "accumulate",
    "applied_updates",
    "build",
    "clip_grad_norm",
    "clip_grad_value",
    "consecutive_skips",
    "current_scale",
    "descend",
    "dynamic_loss_scale",
    "eval_step",
    "finite_leaves",
    "init_state",
    "is_factory",
    "leaf_name",
    "limit_recompilation",
    "load_state_dict",
    "micro_batch_key",
    "optimizer_in_float32",
    "rate_at",
    "scale_by_learning_rate",
    "split_batch",
    "state_dict",
    "static_loss_scale",
    "step",
    "train_step",
    "used_learning_rate",
    "used_learning_rates",
    "validated",
    "window_step",
]
