"""Learning rate schedules: off by one update, or with another end."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import optax
from torch import optim as T
from torch.optim import lr_scheduler as S

from jaxtrain import optim
from jaxtrain.optim import schedules
from parity.mutate.mutant import Mutant
from tests.parity.mutants.optimizers import trained

LR = 0.05


def mutants(scheduler: Any, right: Any, steps: int = 5, **wrong: Any) -> list[Mutant]:
    """A mutant for each of the schedules `wrong`, by name."""
    torch = partial(T.SGD, lr=LR)
    clean = partial(trained, torch, optim.sgd(right), scheduler)
    return [
        Mutant(
            name.replace("_", "-"),
            partial(trained, torch, optim.sgd(ours), scheduler),
            clean,
            "update",
            settings={"steps": steps},
        )
        for name, ours in wrong.items()
    ]


def early(schedule: Any) -> Any:
    """The schedule one update ahead."""
    return lambda count: schedule(count + 1)


def late(schedule: Any) -> Any:
    """The schedule one update behind."""
    return lambda count: schedule(jnp.maximum(count - 1, 0))


STEP = schedules.step_lr(LR, 2)

MUTANTS = [
    *mutants(
        partial(S.CosineAnnealingLR, T_max=2),
        schedules.cosine_annealing_lr(LR, 2),
        cosine_stays_at_the_end=optax.cosine_decay_schedule(LR, 2),
        cosine_of_one_update_less=schedules.cosine_annealing_lr(LR, 1),
        cosine_minimum=schedules.cosine_annealing_lr(LR, 2, 1e-3),
    ),
    *mutants(
        partial(S.LinearLR, total_iters=3),
        schedules.linear_lr(LR, total_iters=3),
        linear_starts_at_0=optax.linear_schedule(0.0, LR, 3),
        linear_factor_taken_for_a_rate=optax.linear_schedule(1 / 3, LR, 3),
        linear_of_one_update_more=schedules.linear_lr(LR, total_iters=4),
    ),
    *mutants(
        partial(S.OneCycleLR, max_lr=LR, total_steps=10, cycle_momentum=False),
        schedules.one_cycle_lr(LR, 10),
        9,
        one_cycle_optaxs=optax.cosine_onecycle_schedule(10, LR, 0.3),
        one_cycle_of_one_update_more=schedules.one_cycle_lr(LR, 11),
    ),
    *mutants(
        partial(S.StepLR, step_size=2),
        STEP,
        schedule_counts_from_1=early(STEP),
        schedule_one_update_late=late(STEP),
        schedule_never_steps=lambda count: LR,
        step_lr_continuous=optax.exponential_decay(LR, 2, 0.1),
    ),
    *mutants(
        partial(S.MultiStepLR, milestones=[1, 3]),
        schedules.multi_step_lr(LR, [1, 3]),
        multi_step_milestones_relative=schedules.multi_step_lr(LR, [1, 4]),
    ),
    *mutants(
        partial(S.ExponentialLR, gamma=0.5),
        schedules.exponential_lr(LR, 0.5),
        exponential_is_linear=optax.linear_schedule(LR, 0.0, 4),
    ),
    *mutants(
        partial(S.PolynomialLR, total_iters=4, power=2.0),
        schedules.polynomial_lr(LR, 4, 2.0),
        polynomial_power=schedules.polynomial_lr(LR, 4, 1.0),
    ),
    *mutants(
        partial(S.CosineAnnealingWarmRestarts, T_0=1, T_mult=2),
        schedules.cosine_annealing_warm_restarts(LR, 1, 2),
        warm_restarts_alike=schedules.cosine_annealing_warm_restarts(LR, 1, 1),
    ),
    Mutant(
        "rmsprop-rate-in-the-momentum",
        partial(
            trained,
            partial(T.RMSprop, lr=LR, momentum=0.9),
            optax.rmsprop(STEP, 0.99, momentum=0.9, eps_in_sqrt=False),
            partial(S.StepLR, step_size=2),
        ),
        partial(
            trained,
            partial(T.RMSprop, lr=LR, momentum=0.9),
            optim.rmsprop(STEP, momentum=0.9),
            partial(S.StepLR, step_size=2),
        ),
        "update",
    ),
]
