"""Chaos is measured with PyTorch itself, and a bug is not mistaken for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax
import pytest
import torch

import jaxtrain
from jaxtrain.interop import NameTable, TorchParam
from parity.bars import LAST_BAR
from parity.case import Case
from parity.cases.built_in import gpt2_case, mlp_case
from parity.compare.reference import REORDERINGS, live_reference
from parity.compare.trajectory import trajectory
from parity.optimizer import AdamW, Optimizer
from parity.run import check, examine
from parity.settings import settings_of
from parity.sides import torch_side

CHAOTIC, STABLE = 1.5, 0.1
"""Learning rates. Gradient descent on w⁴/4 − w²/2 is the cubic map, which is chaotic beyond a rate of about 1.3."""


class Wells(torch.nn.Module):
    """Weights, each in the double well w⁴/4 − w²/2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(7) + 0.1)


def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    w = model.w
    return (batch["x"][:, None] * (w**4 / 4 - w**2 / 2)).sum(), len(batch["x"])


def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
    w = params["w"]
    return jaxtrain.Loss((batch["x"][:, None] * (w**4 / 4 - w**2 / 2)[None]).sum(), len(batch["x"])), {}


def wells(lr: float, ours: Any = None) -> Case:
    return Case(
        name="wells",
        torch_model=Wells,
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like={"w": np.zeros(7)},
        names=NameTable({"w": TorchParam("w")}),
        batch=lambda seed, rows: {
            "x": (1 + 0.05 * np.random.default_rng(seed).standard_normal(rows)).astype(np.float32)
        },
        rows=16,
        optimizer=Optimizer("SGD", lambda named: torch.optim.SGD(named, lr), ours or optax.sgd(lr)),
        clip_norm=None,
    )


def test_a_trajectory_contains_running_maxima_and_the_spread_of_its_runs() -> None:
    found = trajectory([1e-9, 0.0, 4e-8], [[2e-9, 1e-9, 1e-7], [1e-9, 4e-9, 2e-8]], limit=LAST_BAR)
    np.testing.assert_allclose(found.apart, [1e-9, 1e-9, 4e-8])
    np.testing.assert_allclose(found.one_ulp, [2e-9, 4e-9, 1e-7])
    np.testing.assert_allclose(found.spread, [2, 2, 5])
    np.testing.assert_allclose(found.noise, [4e-9, 8e-9, 5e-7])
    assert (found.chaos, found.parted) == (3, 3)


def test_a_nonfinite_run_has_an_infinite_distance() -> None:
    found = trajectory([0.0, np.nan, 0.0], [[0.0, 1e-9, np.nan], [0.0, np.inf, 0.0]], limit=LAST_BAR)
    assert found.apart.tolist() == [0, np.inf, np.inf]
    assert found.noise.tolist() == [0, np.inf, np.inf]


@pytest.mark.parametrize("seed", [0, 1])
def test_runs_that_diverge_no_more_than_one_ulp_explains_pass_and_report_chaos(seed: int) -> None:
    examination = examine(wells(CHAOTIC), steps=60, seed=seed)
    verdict = examination.verdict
    assert verdict.passed, verdict.faults
    found = verdict.trajectory
    assert found is not None
    assert found.chaos is not None
    assert found.parted is not None
    assert 20 < found.chaos < 50
    assert abs(found.chaos - found.parted) < 20
    assert verdict.loss_rel > 1e3 * LAST_BAR


def test_a_stable_run_has_no_chaos_and_is_compared_up_to_its_last_step() -> None:
    found = check(wells(STABLE), steps=60).trajectory
    assert found is not None
    assert found.chaos is found.parted is None
    assert str(found).startswith("no chaos in 60 steps")
    late = optax.join_schedules([optax.constant_schedule(STABLE), optax.constant_schedule(STABLE * 1.1)], [40])
    verdict = check(wells(STABLE, optax.sgd(late)), steps=60)
    assert [fault.split(",")[0] for fault in verdict.faults] == ["loss", "params after the last step"]


@pytest.mark.parametrize(("start", "wrong"), [(2, 1e-9), (25, 1e-4)])
def test_a_small_bug_in_a_chaotic_run_is_not_mistaken_for_chaos(start: int, wrong: float) -> None:
    rate = optax.join_schedules(
        [optax.constant_schedule(CHAOTIC), optax.constant_schedule(CHAOTIC * (1 + wrong))], [start]
    )
    verdict = check(wells(CHAOTIC, optax.sgd(rate)), steps=60)
    assert not verdict.passed
    assert verdict.trajectory is not None
    assert verdict.trajectory.parted is not None
    assert verdict.trajectory.chaos is not None
    assert verdict.trajectory.parted < verdict.trajectory.chaos
    assert any(fault.startswith("loss, step ") for fault in verdict.faults)


def test_chaos_within_the_compared_steps_fails_and_is_reported() -> None:
    verdict = check(wells(1.9), steps=20, locate=True)
    assert not verdict.passed
    assert verdict.first_divergence is verdict.stage is None
    assert verdict.unlocated is not None
    assert verdict.unlocated.startswith("chaos: the difference is no larger than that of one ulp of PyTorch's weights")


def test_in_low_precision_chaos_begins_where_one_ulp_reaches_the_error_of_the_precision() -> None:
    found = check(wells(CHAOTIC), "fp32", steps=30).trajectory
    assert found is not None
    assert found.chaos is not None
    assert check(wells(STABLE), "fp32", steps=2).trajectory is None


def test_weights_one_ulp_off_are_the_adjacent_floats() -> None:
    lr_0 = dataclasses.replace(mlp_case.case(), optimizer=AdamW(lr=0.0))
    for precision, eps in {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-23, "bf16_params": 2.0**-7}.items():
        plain, perturbed = (
            torch_side.run(lr_0, precision, steps=1, variant=torch_side.Variant(one_ulp=s)).last.params
            for s in (None, 0)
        )
        for name, x in plain.items():
            apart = np.abs(perturbed[name].astype(np.float64) - x) / np.abs(x)
            # In fp64 the update changes the weights by one ulp too, in either direction.
            assert apart.any() if precision == "fp64" else (apart > 0).all()
            assert apart.max() <= (2 * eps if precision == "fp64" else eps)


@pytest.mark.parametrize(("rows", "accumulate"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_the_noise_of_a_single_row_is_measured_by_one_ulp_alone(rows: int, accumulate: int) -> None:
    case = dataclasses.replace(wells(STABLE), rows=rows)
    reference = live_reference(case, "fp32", settings_of(case, steps=4, accumulate=accumulate))
    one_row = rows == accumulate
    assert [len(reference.reordered), len(reference.one_ulp)] == ([0, REORDERINGS] if one_row else [REORDERINGS, 0])
    verdict = check(case, "fp32", steps=4, accumulate=accumulate)
    assert verdict.passed, verdict.faults
    assert (verdict.trajectory is not None) == one_row


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [100])
def test_gpt2_equals_pytorch_for_a_hundred_steps_without_chaos(steps: int) -> None:
    config = dataclasses.replace(gpt2_case.CONFIG, n_layer=1)
    verdict = check(gpt2_case.case(config, reference=config), steps=steps)
    assert verdict.passed, verdict.faults
    assert verdict.trajectory is not None
    assert verdict.trajectory.chaos is None


@pytest.mark.nightly
def test_a_too_large_learning_rate_is_chaos_and_a_wrong_epsilon_with_it_is_a_fault() -> None:
    adamw = AdamW(lr=0.1)
    case = dataclasses.replace(mlp_case.case(), optimizer=adamw)
    verdict = check(case, steps=80)
    assert verdict.passed, verdict.faults
    assert verdict.trajectory is not None
    assert verdict.trajectory.chaos is not None
    ours = dataclasses.replace(adamw, eps=1.1e-8).jax
    wrong = dataclasses.replace(case, optimizer=Optimizer("AdamW", adamw.torch, ours, adamw.moments))
    assert not check(wrong, steps=30).passed
