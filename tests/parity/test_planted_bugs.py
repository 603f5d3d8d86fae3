"""Bugs planted in JAX's training, besides the mutants, are detected."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jaxtrain
from parity import AdamW, Case
from parity.cases import CASES
from parity.cases.built_in import cnn_bn_case, gpt2_case, mlp_case
from parity.run import check
from parity.sides import randomness


def faults(case: Case, **settings: object) -> str:
    verdict = check(case, **{"steps": 6, **settings})
    assert not verdict.passed
    return "; ".join(verdict.faults)


def test_optaxs_float32_bias_correction_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def adamw(options: AdamW) -> optax.GradientTransformation:
        b1, b2 = options.betas
        return optax.adamw(options.lr, b1, b2, options.eps, weight_decay=options.weight_decay)

    monkeypatch.setattr(AdamW, "jax", property(adamw))
    assert "last parameters" in faults(CASES["cnn"](), precision="fp32", steps=20)


def test_bfloat16_products_in_a_float32_run_are_detected() -> None:
    case = CASES["mlp"]()
    in_bfloat16 = dataclasses.replace(case, loss_fn=jaxtrain.autocast(case.loss_fn, jnp.bfloat16))
    assert "first gradient" in faults(in_bfloat16, precision="fp32")


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give PyTorch the dropout masks of the next micro-batch."""
    dropout_masks = randomness.dropout_masks

    def rotated(*args: Any, **settings: Any) -> list[randomness.Masks]:
        first, *rest = dropout_masks(*args, **settings)
        return [*rest, first]

    monkeypatch.setattr(randomness, "dropout_masks", rotated)


@pytest.mark.parametrize("make", [mlp_case.case, cnn_bn_case.case, gpt2_case.case])
def test_dropout_with_the_key_of_another_micro_batch_is_detected(make: Callable[..., Case], shifted: None) -> None:
    assert "first loss" in faults(make(dropout=0.1), accumulate=2, steps=2)


@pytest.mark.parametrize(("perturbed", "eps"), [("a matrix", 3e-11), ("one of its 4096 elements", 1e-9)])
def test_a_tiny_perturbation_of_a_weight_is_detected(perturbed: str, eps: float) -> None:
    case = gpt2_case.case()

    def loss_fn(params: dict[str, Any], batch: Any, rng: Any) -> Any:
        blocks = params["blocks"]
        kernel = blocks["fc"]["kernel"]
        kernel = kernel * (1 + eps) if perturbed == "a matrix" else kernel.at[0, 0, 0].multiply(1 + eps)
        return case.loss_fn({**params, "blocks": {**blocks, "fc": {**blocks["fc"], "kernel": kernel}}}, batch, rng)

    assert faults(dataclasses.replace(case, loss_fn=loss_fn), steps=2)
