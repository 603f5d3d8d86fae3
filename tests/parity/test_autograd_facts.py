"""Well-known examples of automatic differentiation, and training on gradients of gradients."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from parity import check
from parity.case import Case
from parity.cases import CASES
from parity.sides import jax_side, torch_side

FACTS = {
    "autograd.square": {"x": 28, "w": 42, "b": 14},
    "autograd.cubic": {"x": 14},
    "autograd.detach": {"w": 9},
    "autograd.no-grad": {"w": 24},
    "autograd.double-backward": {"w": 288, "x": 144},
    "autograd.reuse": {"w": 7},
}


def unscaled(name: str) -> Case:
    case = CASES[name]()
    return replace(
        case,
        batch=lambda seed, rows: {"scale": np.ones_like(case.batch(seed, rows)["scale"])},
        clip_norm=float("inf"),
    )


def test_every_autograd_case_has_known_gradients() -> None:
    assert list(FACTS) == [name for name in CASES if name.startswith("autograd.")]


@pytest.mark.parametrize(
    ("accumulate", "precision"),
    [
        *((1, "fp64"), (4, "bf16"), (1, "fp32"), (1, "bf16"), (4, "fp64"), (4, "fp32")),
    ],
)
@pytest.mark.parametrize("name", FACTS)
def test_the_first_gradients_equal_the_known_values(name: str, accumulate: int, precision: str) -> None:
    case = unscaled(name)
    weights = torch_side.initial_weights(case, 0)
    ours = jax_side.run(case, weights, precision, accumulate=accumulate, steps=1).grads
    theirs = torch_side.run(case, precision, accumulate=accumulate, steps=1).grads
    assert set(ours) == set(theirs) == set(FACTS[name])
    for parameter, fact in FACTS[name].items():
        np.testing.assert_array_equal(theirs[parameter], np.full_like(weights[parameter], fact))
        np.testing.assert_array_equal(ours[parameter], np.full_like(weights[parameter], fact))


def test_two_backward_passes_over_a_retained_graph_equal_two_pullback_calls() -> None:
    w = torch.tensor(3.0, requires_grad=True)
    value = w + w**2
    value.backward(retain_graph=True)
    assert w.grad == 7
    value.backward()
    assert w.grad == 14
    _, pullback = jax.vjp(lambda w: w + w**2, 3.0)
    assert pullback(1.0)[0] + pullback(1.0)[0] == 14


@pytest.mark.parametrize(
    "name",
    FACTS,
)
def test_in_float32_training_on_autograd_cases_equals_pytorch(name: str) -> None:
    verdict = check(CASES[name](), "fp32")
    assert verdict.passed, verdict.faults


@pytest.mark.parametrize("name", ["gradient-penalty", "maml"])
@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [
        pytest.param("fp32", 1, marks=pytest.mark.nightly),
        pytest.param("bf16", 4, marks=pytest.mark.nightly),
        ("fp16", 1),
    ],
)
def test_in_low_precision_training_on_gradients_of_gradients_equals_pytorch(
    name: str, precision: str, accumulate: int
) -> None:
    verdict = check(CASES[name](), precision, accumulate=accumulate)
    assert verdict.passed, verdict.faults
    if precision != "fp32":
        assert verdict.grad_rel_max > 1e-4, "nothing was computed in low precision"


@pytest.mark.parametrize("name", ["autograd.detach", "autograd.no-grad", "gradient-penalty", "maml"])
def test_a_gradient_wrongly_stopped_or_passed_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CASES[name]()
    # A new function: JAX caches the traces of known ones, also of those patched here.
    case = replace(made, loss_fn=lambda *args: made.loss_fn(*args))
    if name.startswith("autograd."):
        monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    else:
        # The first-order approximation: the gradient in the loss is treated as a constant.
        monkeypatch.setattr(f"parity.cases.{name.replace('-', '_')}.jax", _FirstOrder())
    verdict = check(case, steps=2)
    assert not verdict.passed
    assert "first loss" not in "; ".join(verdict.faults)
    assert "gradient" in verdict.faults[0]


class _FirstOrder:
    """`jax` with a `grad` that is not differentiated."""

    @staticmethod
    def grad(*args, **options):
        gradient = jax.grad(*args, **options)
        return lambda *xs: jax.lax.stop_gradient(gradient(*xs))

    def __getattr__(self, name: str) -> object:
        return getattr(jax, name)
