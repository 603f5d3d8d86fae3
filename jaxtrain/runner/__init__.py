"""Run a recipe: checks, the training loop, checkpoints, guards, signals."""

from jaxtrain.runner.announce import announce as announce
from jaxtrain.runner.announce import conclude as conclude
from jaxtrain.runner.checkpoint import Checkpoints, Retention
from jaxtrain.runner.checkpoint import restore_params as restore_params
from jaxtrain.runner.checkpoint import restore_state as restore_state
from jaxtrain.runner.checkpoint import saved_steps as saved_steps
from jaxtrain.runner.fetched_batches import DispatchedStep as DispatchedStep
from jaxtrain.runner.fetched_batches import FetchedBatch as FetchedBatch
from jaxtrain.runner.finish import analyze_errors as analyze_errors
from jaxtrain.runner.finish import write_end as write_end
from jaxtrain.runner.fit import Fit, fit
from jaxtrain.runner.interval import Interval as Interval
from jaxtrain.runner.lock import check_free as check_free
from jaxtrain.runner.loss_scales import loss_scale as loss_scale
from jaxtrain.runner.preflight import check_settings as check_settings
from jaxtrain.runner.preflight import fp8_products as fp8_products
from jaxtrain.runner.preflight import read_recipe as read_recipe
from jaxtrain.runner.preflight import stored_recipe as stored_recipe
from jaxtrain.runner.recipe_step import defines_optimizer as defines_optimizer
from jaxtrain.runner.recipe_step import frozen as frozen
from jaxtrain.runner.recipe_step import optimizer_expression as optimizer_expression
from jaxtrain.runner.recipe_step import recipe_optimizer as recipe_optimizer
from jaxtrain.runner.recipe_step import schedule_call as schedule_call
from jaxtrain.runner.recipe_step import state_shapes as state_shapes
from jaxtrain.runner.recipe_step import training_step as training_step
from jaxtrain.runner.resume import check_resumed as check_resumed
from jaxtrain.runner.resume import saved_settings as saved_settings
from jaxtrain.runner.session import Outcome as Outcome
from jaxtrain.runner.start import run_training as run_training
from jaxtrain.runner.stops.guards import Guard as Guard
from jaxtrain.runner.stops.guards import SavedStep as SavedStep
from jaxtrain.runner.stops.guards import find_nonfinite_array as find_nonfinite_array
from jaxtrain.runner.stops.guards import read_batch as read_batch
from jaxtrain.runner.training import Training as Training
from jaxtrain.runner.training import build_training as build_training
from jaxtrain.runner.training import held_out_evaluation as held_out_evaluation
from jaxtrain.runner.unsaved import Unsaved as Unsaved

__all__ = ["Checkpoints", "Fit", "Retention", "fit", "preflight"]
