"""Optimizers: optax's conventions, or similar mistakes, in place of PyTorch's."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import optax
from torch import Tensor, float64, nn, ones
from torch import optim as T
from torch.nn.functional import mse_loss
from torch.optim import nadam

from jaxtrain import optim
from parity.case import Case
from parity.mutate.mutant import Mutant, Patch, patched
from parity.optimizer import Optimizer
from tests.parity.mutants.losses import square
from tests.parity.mutants.network import criterion, layered, normal

LR = 0.05


def squares(z: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """The squared error."""
    return mse_loss(z, y, reduction="sum"), z.numel()


def trained(torch: Callable[..., Any], ours: Any, scheduler: Any = None, size: float = 1.0) -> Case:
    """A linear layer trained by both optimizers; `size` scales the inputs and so the gradients."""
    optimizer = Optimizer("mutant", torch, ours, scheduler=scheduler)
    return criterion(squares, square, normal, optimizer=optimizer, size=size)


def mutants(
    torch: Callable[..., Any], right: Any, size: float = 1.0, around: Patch = nullcontext, **wrong: Any
) -> list[Mutant]:
    """A mutant for each of the transformations `wrong`, by name."""
    clean = partial(trained, torch, right, size=size)
    return [
        Mutant(
            name.replace("_", "-"),
            partial(trained, torch, ours, size=size),
            clean,
            "update",
            around=around,
        )
        for name, ours in wrong.items()
    ]


def with_l2(optimizer: Any, weight_decay: float = 0.1) -> Any:
    """Weight decay added to the gradient before the optimizer."""
    return optax.chain(optax.add_decayed_weights(weight_decay), optimizer)


class Spare(nn.Linear):
    """A layer with an unused parameter."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.spare = nn.Parameter(ones(3))


def with_spare(ours: Any) -> Case:
    """A case with a parameter without gradient, which PyTorch's optimizer does not change."""
    optimizer = Optimizer("mutant", partial(T.AdamW, lr=LR, weight_decay=0.1), ours)
    case = layered(Spare, lambda p, x: x @ p["weight"].T + p["bias"], (3,))
    return dataclasses.replace(case, optimizer=optimizer)


def grouped(named: Any) -> T.Optimizer:
    """PyTorch's AdamW with two groups: biases do not decay."""
    return T.AdamW([{"params": [p], "weight_decay": 0.1 * (name == "weight")} for name, p in named], lr=LR)


def by_name(**of: Any) -> Any:
    """A separate optimizer for each parameter."""
    return optim.groups(lambda path: path, of)


ADAMW = optim.adamw(LR, weight_decay=0.1)
SPARED = {"": ADAMW, "spare": optax.set_to_zero()}

MUTANTS = [
    *mutants(
        partial(T.AdamW, lr=LR, weight_decay=0.1),
        ADAMW,
        adamw_decay_left_at_optaxs_default=optim.adamw(LR, weight_decay=1e-4),
        adamw_decay_in_the_gradient=optim.adam(LR, weight_decay=0.1),
        adamw_decay_without_the_rate=optax.chain(optim.adamw(LR, weight_decay=0.0), optax.add_decayed_weights(-0.1)),
        adam_beta2=optim.adamw(LR, 0.9, 0.99, weight_decay=0.1),
        adam_without_bias_correction=optax.chain(
            optax.trace(0.9), optax.scale_by_rms(0.999, eps_in_sqrt=False), optax.scale(-LR)
        ),
        adam_nesterov=optax.nadamw(LR, weight_decay=0.1),
    ),
    *mutants(
        partial(T.Adam, lr=LR),
        optim.adam(LR),
        1e-3,
        adam_eps_in_the_root=optax.adam(LR, eps=0.0, eps_root=1e-8),
        adam_eps=optim.adam(LR, eps=1e-7),
    ),
    *mutants(
        partial(T.Adam, lr=LR, weight_decay=0.1),
        optim.adam(LR, weight_decay=0.1),
        adam_l2_taken_for_decoupled=ADAMW,
    ),
    *mutants(
        partial(T.Adam, lr=LR, amsgrad=True),
        optim.adam(LR, amsgrad=True),
        amsgrad_max_of_the_corrected=optax.amsgrad(LR),
        amsgrad_dropped=optim.adam(LR),
    ),
    *mutants(
        partial(T.RMSprop, lr=LR),
        optim.rmsprop(LR),
        rmsprop_optaxs_decay=optax.rmsprop(LR),
        rmsprop_eps_in_the_root=optax.rmsprop(LR, decay=0.99),
        rmsprop_centered=optim.rmsprop(LR, centered=True),
    ),
    *mutants(
        partial(T.SGD, lr=LR, momentum=0.9),
        optim.sgd(LR, 0.9),
        sgd_momentum_dropped=optim.sgd(LR),
        sgd_momentum_is_an_average=optax.chain(optax.ema(0.9, debias=False), optax.scale(-LR)),
        sgd_nesterov=optim.sgd(LR, 0.9, nesterov=True),
    ),
    *mutants(
        partial(T.SGD, lr=LR, momentum=0.9, dampening=0.5),
        optim.sgd(LR, 0.9, 0.5),
        sgd_dampening_dropped=optim.sgd(LR, 0.9),
        sgd_dampens_the_first=optax.chain(optax.scale(0.5), optim.sgd(LR, 0.9)),
    ),
    *mutants(
        partial(T.SGD, lr=LR, momentum=0.9, weight_decay=0.1),
        optim.sgd(LR, 0.9, weight_decay=0.1),
        sgd_decay_behind_the_momentum=optax.chain(optax.trace(0.9), with_l2(optax.scale(-LR))),
    ),
    *mutants(
        partial(T.Adagrad, lr=LR),
        optim.adagrad(LR),
        adagrad_optaxs_start=optax.adagrad(LR),
        adagrad_eps_in_the_root=optax.adagrad(LR, 0.0, 1e-10),
    ),
    *mutants(
        partial(T.NAdam, lr=LR),
        optim.nadam(LR),
        # PyTorch stores its product of momenta in this dtype, whatever the precision of training.
        around=patched(nadam._get_scalar_dtype, lambda *_: float64, within=nadam),
        nadam_without_momentum_decay=optax.nadam(LR),
    ),
    *mutants(partial(T.RAdam, lr=LR), optim.radam(LR), radam_threshold=optax.radam(LR, threshold=3.0)),
    *mutants(partial(T.Rprop, lr=LR), optim.rprop(LR), rprop_first_step=optax.rprop(LR)),
    *mutants(partial(T.Adadelta, lr=LR), optim.adadelta(LR), adadelta_rho=optim.adadelta(LR, 0.95)),
    *mutants(partial(T.Adamax, lr=LR), optim.adamax(LR), adamax_is_adam=optim.adam(LR)),
    *mutants(partial(T.Adafactor, lr=LR), optim.adafactor(LR), adafactor_optaxs=optax.adafactor(LR)),
    *mutants(
        grouped,
        by_name(weight=ADAMW, bias=optim.adamw(LR, weight_decay=0.0)),
        decay_of_all=ADAMW,
        decay_mask_inverted=by_name(weight=optim.adamw(LR, weight_decay=0.0), bias=ADAMW),
        bias_not_trained=by_name(weight=ADAMW, bias=optax.set_to_zero()),
        bias_trained_twice_as_fast=by_name(weight=ADAMW, bias=optim.adamw(2 * LR, weight_decay=0.0)),
    ),
    Mutant(
        "unused-parameter-decays",
        partial(with_spare, ADAMW),
        partial(with_spare, optim.groups(lambda path: "spare" if "spare" in path else "", SPARED)),
        "update",
    ),
]
