"""A fault is attributed to its stage, whatever its effect on later ones."""

import dataclasses
from collections.abc import Callable

import jax
import optax
import pytest
import torch

from jaxtrain.models import BatchNorm
from parity import Case, Optimizer
from parity.cases import CASES
from parity.cases.built_in import mlp_case
from parity.explain.stages import blame, stages


def named(case: Case, **settings: int) -> dict[str, float]:
    return {stage.name: stage.distance for stage in stages(case, **settings)}


@pytest.mark.parametrize("name", ["mlp", "cnn-bn", "gpt2"])
def test_all_stages_of_a_correct_port_hold(name: str) -> None:
    found = stages(CASES[name](dropout=0.1), accumulate=2, steps=3)
    assert blame(found) is None
    names = ["loss", "gradients", "clipped gradients", "optimizer state", "update"]
    assert [stage.name for stage in found] == [*names, "buffers"] if name == "cnn-bn" else names


def scaled_loss(case: Case) -> Case:
    def loss_fn(params: object, batch: object, rng: object) -> object:
        loss, metrics = case.loss_fn(params, batch, rng)
        return loss._replace(total=1.001 * loss.total), metrics

    return dataclasses.replace(case, loss_fn=loss_fn)


def doubled_gradient(case: Case) -> Case:
    def loss_fn(params: object, batch: object, rng: object) -> object:
        doubled = jax.tree.map(lambda p: 2 * p - jax.lax.stop_gradient(p), params)
        return case.loss_fn(doubled, batch, rng)

    return dataclasses.replace(case, loss_fn=loss_fn)


def other_moment(case: Case) -> Case:
    return with_adam(case, b2=0.99)


def eps_in_root(case: Case) -> Case:
    return with_adam(case, eps=0.0, eps_root=1e-16)


def with_adam(case: Case, **options: float) -> Case:
    return dataclasses.replace(
        case,
        optimizer=Optimizer(
            "Adam",
            lambda params: torch.optim.Adam(params, lr=1e-2),
            optax.adam(1e-2, **options),
            {"exp_avg": "mu", "exp_avg_sq": "nu"},
        ),
    )


@pytest.mark.parametrize(
    ("bug", "stage"),
    [
        (scaled_loss, "loss"),
        (doubled_gradient, "gradients"),
        (other_moment, "optimizer state"),
        (eps_in_root, "update"),
    ],
)
def test_a_fault_is_attributed_to_its_stage(bug: Callable[[Case], Case], stage: str) -> None:
    expected = blame(stages(bug(mlp_case.case(side=8, hidden=32)), steps=3))
    assert expected is not None
    assert expected.startswith(f"{stage}: ")


def test_stages_after_a_fault_get_pytorchs_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = named(doubled_gradient(mlp_case.case(side=8, hidden=32)), steps=3)
    assert found["gradients"] == pytest.approx(1.0)
    assert max(distance for name, distance in found.items() if name != "gradients") < 1e-12


def test_clipping_and_running_statistics_are_separate_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.explain.stages.clip_grad_norm", lambda grads, bound: (grads, 0.0))
    clipped = dataclasses.replace(mlp_case.case(side=8, hidden=32), clip_norm=0.5)
    assert str(blame(stages(clipped, steps=3))).startswith("clipped gradients: ")
    monkeypatch.undo()
    init = BatchNorm.__init__
    monkeypatch.setattr(BatchNorm, "__init__", lambda self, n, **kw: init(self, n, **{**kw, "momentum": 0.9}))
    assert str(blame(stages(CASES["cnn-bn"](), steps=3))).startswith("buffers: ")


def test_a_fault_is_reported_with_the_first_step_that_shows_it() -> None:
    case = dataclasses.replace(
        mlp_case.case(side=8, hidden=32),
        optimizer=Optimizer(
            "SGD",
            lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1),
            optax.sgd(1e-2, momentum=0.9),
            {"momentum_buffer": "trace"},
        ),
    )
    (stage,) = (stage for stage in stages(case, steps=3) if stage.name == "update")
    assert (stage.holds, stage.step) == (False, 2)
