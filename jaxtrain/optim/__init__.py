"""PyTorch's optimizers and learning rate schedulers, and bitsandbytes' 8-bit optimizers, as optax transformations.

Not included: LBFGS, whose step is not a function of one gradient, because its line search evaluates the loss any number
of times; SparseAdam, because JAX's gradients are dense.
"""

from jaxtrain.optim import blockwise_quantization as blockwise_quantization
from jaxtrain.optim import eight_bit as eight_bit
from jaxtrain.optim.adadelta import adadelta
from jaxtrain.optim.adafactor import adafactor
from jaxtrain.optim.adagrad import adagrad
from jaxtrain.optim.adamax import adamax
from jaxtrain.optim.adamw import adam, adamw, scale_by_adam
from jaxtrain.optim.asgd import asgd
from jaxtrain.optim.batch_size import EffectiveBatch
from jaxtrain.optim.blockwise_quantization import BLOCK as BLOCK
from jaxtrain.optim.blockwise_quantization import Blockwise as Blockwise
from jaxtrain.optim.clamped import clamped
from jaxtrain.optim.clipped import clipped
from jaxtrain.optim.dynamic_map import SIGNED as SIGNED
from jaxtrain.optim.dynamic_map import UNSIGNED as UNSIGNED
from jaxtrain.optim.eight_bit import MIN_8BIT_SIZE as MIN_8BIT_SIZE
from jaxtrain.optim.eight_bit import adam8bit, adamw8bit, sgd8bit
from jaxtrain.optim.expression import OPTIMIZERS as OPTIMIZERS
from jaxtrain.optim.expression import SCHEDULES as SCHEDULES
from jaxtrain.optim.expression import Call as Call
from jaxtrain.optim.expression import Expression as Expression
from jaxtrain.optim.expression import build_expression as build_expression
from jaxtrain.optim.expression import complete_expression as complete_expression
from jaxtrain.optim.expression import format_expression as format_expression
from jaxtrain.optim.expression import parse_expression as parse_expression
from jaxtrain.optim.groups import all_but, groups, no_decay
from jaxtrain.optim.groups import decay_mask as decay_mask
from jaxtrain.optim.metric_rate import rate_of_metric
from jaxtrain.optim.moments import average as average
from jaxtrain.optim.moments import squares as squares
from jaxtrain.optim.moments import zeros as zeros
from jaxtrain.optim.muon import muon
from jaxtrain.optim.nadam import nadam
from jaxtrain.optim.plateau import PlateauState as PlateauState
from jaxtrain.optim.plateau import reduce_lr_on_plateau
from jaxtrain.optim.radam import radam
from jaxtrain.optim.rmsprop import rmsprop
from jaxtrain.optim.rprop import rprop
from jaxtrain.optim.sgd import sgd
from jaxtrain.optim.turns import added, at_turn
from jaxtrain.step import scale_by_learning_rate, used_learning_rate, used_learning_rates

__all__ = [
    "EffectiveBatch",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adam8bit",
    "adamax",
    "adamw",
    "adamw8bit",
    "added",
    "all_but",
    "asgd",
    "at_turn",
    "clamped",
    "clipped",
    "groups",
    "muon",
    "nadam",
    "no_decay",
    "radam",
    "rate_of_metric",
    "reduce_lr_on_plateau",
    "rmsprop",
    "rprop",
    "scale_by_adam",
    "scale_by_learning_rate",
    "schedules",
    "sgd",
    "sgd8bit",
    "used_learning_rate",
    "used_learning_rates",
]
