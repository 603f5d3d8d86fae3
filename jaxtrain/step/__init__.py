"""The training step: scale, differentiate, accumulate, unscale, check, clip, update, rescale.

`step.py` is the algorithm, `build.py` defines `train_step`, `loss_program.py` lists the passes of the loss.
"""

from jaxtrain.step.accumulate import split_batch as split_batch
from jaxtrain.step.build import TrainStep, train_step
from jaxtrain.step.checks.batch import require_32_bits as require_32_bits
from jaxtrain.step.checks.batch import require_equal_rows as require_equal_rows
from jaxtrain.step.checks.diagnosis import takes_one_batch as takes_one_batch
from jaxtrain.step.checks.first_loss import cause_in_batch as cause_in_batch
from jaxtrain.step.checks.first_loss import failed_assumption as failed_assumption
from jaxtrain.step.checks.mistakes import accepts as accepts
from jaxtrain.step.checks.mistakes import check_optimizer as check_optimizer
from jaxtrain.step.checks.mistakes import signature_of as signature_of
from jaxtrain.step.checks.retrace import limit_recompilation as limit_recompilation
from jaxtrain.step.compiler_options import CompilerOptions as CompilerOptions
from jaxtrain.step.compiler_options import compiler_options as compiler_options
from jaxtrain.step.complex_parameters import as_complex as as_complex
from jaxtrain.step.complex_parameters import as_real as as_real
from jaxtrain.step.complex_parameters import refuse_complex as refuse_complex
from jaxtrain.step.evaluation import eval_step
from jaxtrain.step.explained import Phase as Phase
from jaxtrain.step.explained import explained as explained
from jaxtrain.step.initial_state import init_state as init_state
from jaxtrain.step.loss_program import LossProgram as LossProgram
from jaxtrain.step.loss_scale import LossScaleState as LossScaleState
from jaxtrain.step.loss_scale import consecutive_skips as consecutive_skips
from jaxtrain.step.loss_scale import current_scale as current_scale
from jaxtrain.step.loss_scale import dynamic_loss_scale, load_state_dict, state_dict, static_loss_scale
from jaxtrain.step.loss_scale import is_scaled as is_scaled
from jaxtrain.step.lost_values import KINDS as KINDS
from jaxtrain.step.lost_values import LayerLosses, Magnitudes, PrecisionLosses
from jaxtrain.step.nonfinite import finite_leaves as finite_leaves
from jaxtrain.step.nonfinite import leaf_name
from jaxtrain.step.objective import STEP_METRICS as STEP_METRICS
from jaxtrain.step.objective import Loss
from jaxtrain.step.objective import LossFn as LossFn
from jaxtrain.step.objective import validated as validated
from jaxtrain.step.options import StepOptions as StepOptions
from jaxtrain.step.options import option_names as option_names
from jaxtrain.step.parts import StepParts as StepParts
from jaxtrain.step.precision_losses import PrecisionMeasurement, precision_losses
from jaxtrain.step.state import TrainState
from jaxtrain.step.state import applied_updates as applied_updates
from jaxtrain.step.state import averaged as averaged
from jaxtrain.step.state import is_factory as is_factory
from jaxtrain.step.state import micro_batch_key as micro_batch_key
from jaxtrain.step.step import Step as Step
from jaxtrain.step.step import window_step as window_step
from jaxtrain.step.update.clip import clip_grad_norm as clip_grad_norm
from jaxtrain.step.update.clip import clip_grad_value as clip_grad_value
from jaxtrain.step.update.float32_arithmetic import optimizer_in_float32 as optimizer_in_float32
from jaxtrain.step.update.learning_rate import LearningRate as LearningRate
from jaxtrain.step.update.learning_rate import LearningRateState as LearningRateState
from jaxtrain.step.update.learning_rate import descend as descend
from jaxtrain.step.update.learning_rate import rate_at as rate_at
from jaxtrain.step.update.learning_rate import scale_by_learning_rate, used_learning_rate, used_learning_rates
from jaxtrain.step.update.rounding import apply_updates as apply_updates
from jaxtrain.step.update.rounding import stochastic_round as stochastic_round
from jaxtrain.step.window.mesh_window import mesh_gradient as mesh_gradient
from jaxtrain.step.window.window_loop import LONGEST as LONGEST

__all__ = [
    "LayerLosses",
    "Loss",
    "Magnitudes",
    "PrecisionLosses",
    "PrecisionMeasurement",
    "TrainState",
    "TrainStep",
    "accumulate",
    "build",
    "dynamic_loss_scale",
    "eval_step",
    "leaf_name",
    "load_state_dict",
    "precision_losses",
    "scale_by_learning_rate",
    "state_dict",
    "static_loss_scale",
    "step",
    "train_step",
    "used_learning_rate",
    "used_learning_rates",
]
