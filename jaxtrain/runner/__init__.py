"""The host side of a run: its folder, its checks, its loop, its checkpoints."""

from jaxtrain.runner.checkpoint import Checkpoints, restore_params, restore_state, saved_steps
from jaxtrain.runner.guards import DispatchedStep, Guard, find_nonfinite_array, read_batch
from jaxtrain.runner.lock import check_free
from jaxtrain.runner.loop import Interval, Outcome, Training, build_training, fit
from jaxtrain.runner.optimizer import loss_scale, optimizer_expression, schedule_call, training_step
from jaxtrain.runner.preflight import check_settings, read_recipe

__all__ = [
    "Checkpoints",
    "DispatchedStep",
    "Guard",
    "Interval",
    "Outcome",
    "Training",
    "build_training",
    "check_free",
    "check_settings",
    "find_nonfinite_array",
    "fit",
    "loss_scale",
    "optimizer_expression",
    "preflight",
    "read_batch",
    "read_recipe",
    "restore_params",
    "restore_state",
    "saved_steps",
    "schedule_call",
    "training_step",
]
