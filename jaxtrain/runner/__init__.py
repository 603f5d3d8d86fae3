"""The host side of a run: its folder, its checks, its loop, its checkpoints."""

from jaxtrain.runner.checkpoint import Checkpoints, restore_params, restore_state, steps
from jaxtrain.runner.guards import Guard, Taken, nonfinite_in, read_batch
from jaxtrain.runner.lock import check_free
from jaxtrain.runner.loop import Interval, Outcome, Training, build_training, fit
from jaxtrain.runner.optimizer import expression, loss_scale, schedule_call, training_step
from jaxtrain.runner.preflight import check_settings, read_recipe

__all__ = [
    "Checkpoints",
    "Guard",
    "Interval",
    "Outcome",
    "Taken",
    "Training",
    "build_training",
    "check_free",
    "check_settings",
    "expression",
    "fit",
    "loss_scale",
    "nonfinite_in",
    "preflight",
    "read_batch",
    "read_recipe",
    "restore_params",
    "restore_state",
    "schedule_call",
    "steps",
    "training_step",
]
