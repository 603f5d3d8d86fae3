"""PyTorch's optimizers and learning rate schedulers, said in optax.

Not here: LBFGS, whose step evaluates the loss as often as its line search likes and so is no function of one gradient;
SparseAdam, as JAX's gradients are dense.
"""

from jaxtrain.optim.adadelta import adadelta
from jaxtrain.optim.adafactor import adafactor
from jaxtrain.optim.adagrad import adagrad
from jaxtrain.optim.adamax import adamax
from jaxtrain.optim.adamw import adam, adamw, scale_by_adam
from jaxtrain.optim.asgd import asgd
from jaxtrain.optim.from_torch import from_torch
from jaxtrain.optim.groups import all_but, groups, no_decay
from jaxtrain.optim.learning_rate import scale_by_learning_rate, used_learning_rate, used_learning_rates
from jaxtrain.optim.muon import muon
from jaxtrain.optim.nadam import nadam
from jaxtrain.optim.plateau import reduce_lr_on_plateau
from jaxtrain.optim.radam import radam
from jaxtrain.optim.rmsprop import rmsprop
from jaxtrain.optim.rprop import rprop
from jaxtrain.optim.sgd import sgd

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "all_but",
    "asgd",
    "from_torch",
    "groups",
    "muon",
    "nadam",
    "no_decay",
    "radam",
    "reduce_lr_on_plateau",
    "rmsprop",
    "rprop",
    "scale_by_adam",
    "scale_by_learning_rate",
    "sgd",
    "used_learning_rate",
    "used_learning_rates",
]
