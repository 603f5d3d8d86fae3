"""The schedulers of `torch.optim.lr_scheduler` (`torch/optim/lr_scheduler.py`) as functions of the number of updates.

PyTorch computes most of them by recursion, each rate from the last, which accumulates one rounding per update. Here
they are closed forms, equal to PyTorch's except for that drift. Periods are reduced in integers, and powers are
exponentials of a logarithm computed in double, so that float32 suffices for long runs.

A `Scheduler` is an optax schedule that also has PyTorch's recursion, which `chained` needs.
"""

from jaxtrain.optim.schedules.composition import chained, held, sequential, shifted
from jaxtrain.optim.schedules.cycles import annealed, cyclic_lr, cyclic_momentum, one_cycle_lr, one_cycle_momentum
from jaxtrain.optim.schedules.decay import (
    constant_lr,
    cosine_annealing_lr,
    cosine_annealing_warm_restarts,
    exponential_lr,
    lambda_lr,
    linear_lr,
    multi_step_lr,
    multiplicative_lr,
    polynomial_lr,
    step_lr,
)
from jaxtrain.optim.schedules.scheduler import Scheduler
from jaxtrain.optim.schedules.warmup import warmup_cosine, wsd

__all__ = [
    "Scheduler",
    "annealed",
    "chained",
    "constant_lr",
    "cosine_annealing_lr",
    "cosine_annealing_warm_restarts",
    "cyclic_lr",
    "cyclic_momentum",
    "exponential_lr",
    "held",
    "lambda_lr",
    "linear_lr",
    "multi_step_lr",
    "multiplicative_lr",
    "one_cycle_lr",
    "one_cycle_momentum",
    "polynomial_lr",
    "sequential",
    "shifted",
    "step_lr",
    "warmup_cosine",
    "wsd",
]
