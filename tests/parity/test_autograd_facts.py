"""Well-known examples of automatic differentiation, and training on gradients of gradients."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from parity import check, jax_side, torch_side
from parity.case import Case
from parity.cases import CASES

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


def test_every_fact_is_a_case_and_every_such_case_a_fact() -> None:
    assert list(FACTS) == [name for name in CASES if name.startswith("autograd.")]


@pytest.mark.parametrize(
    ("accumulate", "precision"),
    [
        *((1, "fp64"), (4, "bf16")),
        # Every fact holds in each level of both by the two above; these are the other pairs.
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, "fp32"), (1, "bf16"), (4, "fp64"), (4, "fp32"))),
    ],
)
@pytest.mark.parametrize("name", FACTS)
def test_the_first_gradients_are_the_well_known_numbers(name: str, accumulate: int, precision: str) -> None:
    case = unscaled(name)
    weights = torch_side.initial_weights(case, 0)
    ours = jax_side.run(case, weights, precision, accumulate=accumulate, steps=1).grads
    theirs = torch_side.run(case, precision, accumulate=accumulate, steps=1).grads
    assert set(ours) == set(theirs) == set(FACTS[name])
    for parameter, fact in FACTS[name].items():
        np.testing.assert_array_equal(theirs[parameter], np.full_like(weights[parameter], fact))
        np.testing.assert_array_equal(ours[parameter], np.full_like(weights[parameter], fact))


def test_a_retained_graph_walked_twice_is_a_pullback_called_twice() -> None:
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
    [
        # A stopped gradient and a derivative in the loss; the others are plain polynomials.
        pytest.param(name, marks=[] if name in ("autograd.detach", "autograd.double-backward") else [pytest.mark.slow])
        for name in FACTS
    ],
)
def test_in_float32_training_on_the_facts_equals_pytorchs(name: str) -> None:
    verdict = check(CASES[name](), "fp32")
    assert verdict.passed, verdict.faults


@pytest.mark.parametrize("name", ["gradient-penalty", pytest.param("maml", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [pytest.param("fp32", 1, marks=pytest.mark.slow), pytest.param("bf16", 4, marks=pytest.mark.slow), ("fp16", 1)],
)
def test_in_low_precision_training_on_gradients_of_gradients_is_pytorchs(
    name: str, precision: str, accumulate: int
) -> None:
    verdict = check(CASES[name](), precision, accumulate=accumulate)
    assert verdict.passed, verdict.faults
    if precision != "fp32":
        assert verdict.grad_rel_max > 1e-4, "nothing was computed in low precision"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["autograd.detach", "autograd.no-grad", "gradient-penalty", "maml"])
def test_a_gradient_wrongly_stopped_or_passed_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CASES[name]()
    # A function of its own: JAX keeps the traces of those it knows, of the patched ones too.
    case = replace(made, loss_fn=lambda *args: made.loss_fn(*args))
    if name.startswith("autograd."):
        monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    else:
        # The first-order approximation: the gradient in the loss is taken for a constant.
        monkeypatch.setattr(f"parity.cases.{name.replace('-', '_')}.jax", _FirstOrder())
    verdict = check(case, steps=2)
    assert not verdict.passed
    assert "first loss" not in "; ".join(verdict.faults)
    assert "gradient" in verdict.faults[0]


class _FirstOrder:
    """`jax`, but for a `grad` that is not differentiated."""

    @staticmethod
    def grad(*args, **options):
        gradient = jax.grad(*args, **options)
        return lambda *xs: jax.lax.stop_gradient(gradient(*xs))

    def __getattr__(self, name: str) -> object:
        return getattr(jax, name)
