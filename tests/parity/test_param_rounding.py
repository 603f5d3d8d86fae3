"""Distances from the float64 run of bfloat16 parameters, by their rounding."""

import dataclasses
from functools import partial

import numpy as np
import torch
from torch import optim as T

from jaxtrain import optim
from parity.cases import CASES
from parity.optimizer import Optimizer
from parity.record import Tensors
from parity.sides import jax_side, torch_side
from parity.sides.param_rounding import stochastically

STEPS, RATE = 40, 1e-4


def distance(a: Tensors, b: Tensors) -> float:
    return float(np.sqrt(sum(((a[name].astype(np.float64) - b[name]) ** 2).sum() for name in b)))


def test_kahan_follows_float32_masters_and_nearest_rounding_does_not() -> None:
    made = CASES["gpt2"]()

    def model() -> torch.nn.Module:
        """The case's model, with weights that bfloat16 has."""
        module = made.torch_model()
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(p.bfloat16())
        return module

    optimizer = Optimizer("AdamW", partial(T.AdamW, lr=RATE), optim.adamw(RATE))
    case = dataclasses.replace(made, torch_model=model, optimizer=optimizer)
    weights = torch_side.initial_weights(case, 0)
    true = torch_side.run(case, "fp64", steps=STEPS).last.params
    moved = distance(weights, true)
    masters, nearest, stochastic, kahan = (
        distance(jax_side.run(case, weights, precision, steps=STEPS).last.params, true) / moved
        for precision in ("bf16_compute", "bf16_params", "bf16_params_stochastic", "bf16_params_kahan")
    )
    assert masters < kahan < 0.15
    assert kahan < nearest / 3
    assert stochastic < nearest


def test_stochastic_rounding_in_pytorch_keeps_the_mean():
    after = torch.full((100_000,), 1 + 2.0**-9)
    rounded = stochastically(after, after, {}).double()
    assert rounded.unique().tolist() == [1, 1 + 2.0**-7]
    assert abs(rounded.mean() - after[0]) < 5e-5  # five standard deviations
