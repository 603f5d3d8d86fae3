"""Run a recipe: checks, the training loop, checkpoints, guards, signals."""

from jaxtrain.runner.batches import DispatchedStep, FetchedBatch
from jaxtrain.runner.checkpoint import Checkpoints, Retention, restore_params, restore_state, saved_steps
from jaxtrain.runner.guards import Guard, SavedStep, find_nonfinite_array, read_batch
from jaxtrain.runner.interval import Interval
from jaxtrain.runner.lock import check_free
from jaxtrain.runner.loop import Outcome, fit
from jaxtrain.runner.optimizer import loss_scale, optimizer_expression, schedule_call, training_step
from jaxtrain.runner.preflight import check_settings, read_recipe, stored_recipe
from jaxtrain.runner.training import Training, build_training

__all__ = [
    "Checkpoints",
    "DispatchedStep",
    "FetchedBatch",
    "Guard",
    "Interval",
    "Outcome",
    "Retention",
    "SavedStep",
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
    "stored_recipe",
    "training_step",
]
