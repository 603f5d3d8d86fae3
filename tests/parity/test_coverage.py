"""Behavior that a check does not exercise is reported, and tried where possible."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain.step.step
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.losses import subgradients
from jaxtrain.step.update.clip import clip_grad_norm
from parity.case import AdamW, Case
from parity.cases import CASES
from parity.cases.built_in import gpt2_case, mlp_case
from parity.run import check, examine


def test_a_case_that_exercises_everything_reports_nothing() -> None:
    case = CASES["maml"]()
    norms = examine(case, steps=4).theirs.grad_norms
    assert examine(dataclasses.replace(case, clip_norm=float(sorted(norms)[1]) * 1.001), steps=4).not_exercised == ()


def test_positions_beyond_every_batch_are_reported() -> None:
    found = examine(gpt2_case.case(tokens=9), steps=3).not_exercised
    assert "transformer.wpe.weight: 8 of 16 rows never had a gradient" in found


def test_a_single_step_is_reported() -> None:
    assert any(
        "one step exercises no momentum" in line
        for line in examine(mlp_case.case(side=8, hidden=32), steps=1).not_exercised
    )


@pytest.mark.parametrize(("bound", "expected"), [(1e3, "no step was clipped"), (1e-3, "every step was clipped")])
def test_a_clip_norm_that_clips_never_or_always_is_reported_and_another_tried(bound: float, expected: str) -> None:
    case = dataclasses.replace(mlp_case.case(side=8, hidden=32), clip_norm=bound)
    found = examine(case, steps=3, locate=True)
    assert found.verdict.passed
    assert any(line.startswith(expected) for line in found.not_exercised)
    assert any(line.startswith("clipping holds with clip_norm") for line in found.not_exercised)


def test_a_bug_in_clipping_is_found_although_the_clip_norm_never_clips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halved(grads: object, bound: float | None) -> tuple[object, jax.Array]:
        clipped, norm = clip_grad_norm(grads, bound)
        return jax.tree.map(lambda c, g: jax.numpy.where(norm > bound, c / 2, g), clipped, grads), norm

    monkeypatch.setattr(jaxtrain.step.step, "clip_grad_norm", halved)
    case = dataclasses.replace(mlp_case.case(side=8, hidden=32), clip_norm=1e3)
    assert examine(case, steps=3).verdict.passed
    found = examine(case, steps=3, locate=True).verdict
    assert not found.passed
    assert found.faults[0].startswith("clip_norm ")


class Slopes(torch.nn.Module):
    """Weights, of which every other one is 0 and remains 0 while its slope is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.0, 0.3, 0.0, 0.7]))


def kinked(theirs: Any, ours: Any) -> Case:
    """Return a case whose loss is a function of the weights, times the sum of four rows."""
    return Case(
        name="kinked",
        torch_model=Slopes,
        torch_loss=lambda model, batch: ((batch["x"].sum() * theirs(model.w)).sum(), 4),
        loss_fn=lambda params, batch, rng: (jaxtrain.Loss((batch["x"].sum() * ours(params["w"])).sum(), 4), {}),
        params_like={"w": np.zeros(4)},
        names=NameTable({"w": TorchParam("w")}),
        batch=lambda seed, rows: {"x": np.random.default_rng(seed).standard_normal((rows, 1)).astype(np.float32)},
        rows=4,
        optimizer=AdamW(lr=1e-2),
        clip_norm=None,
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "fixed", "expected"),
    [
        (
            torch.abs,
            jnp.abs,
            subgradients.abs,
            ("abs: JAX's slope at 0 is 1: jaxtrain.losses.subgradients.abs", "; kink: input of abs at 0, 2 times"),
        ),
        (
            lambda w: w.reshape(2, 2).max(0).values,
            lambda w: w.reshape(2, 2).max(0),
            lambda w: subgradients.max(w.reshape(2, 2), 0),
            ("max: JAX's ties share it: jaxtrain.losses.subgradients.max", "; tie: in max, once"),
        ),
    ],
)
def test_another_slope_at_a_kink_fails_and_is_diagnosed_with_the_number_of_inputs_there(
    theirs: Any, ours: Any, fixed: Any, expected: tuple[str, str]
) -> None:
    verdict = check(kinked(theirs, ours), steps=1, locate=True)
    assert not verdict.passed
    assert verdict.stage is not None
    assert verdict.stage.startswith("gradients")
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.startswith(expected[0])
    assert verdict.diagnosis.endswith(expected[1])
    assert check(kinked(theirs, fixed), steps=1).passed


def test_inputs_at_kinks_are_counted_where_no_single_convention_explains_the_slopes() -> None:
    def both(f: Any, clamp: Any) -> Any:
        return lambda w: f(w) + clamp(w)

    theirs = both(torch.abs, lambda w: w.clamp(min=0.0))
    verdict = check(kinked(theirs, both(jnp.abs, lambda w: jnp.maximum(w, 0.0))), steps=1, locate=True)
    assert not verdict.passed
    assert verdict.diagnosis is not None
    assert "kink: input of abs at 0, 2 times; kink: input of clamp at a bound, 2 times" in verdict.diagnosis
    assert "jaxtrain.losses.subgradients" in verdict.diagnosis
