"""Bugs planted in JAX's training are detected."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxtrain
import jaxtrain.models.cnn
import jaxtrain.models.gpt2
import jaxtrain.models.mlp
import jaxtrain.step.build
import jaxtrain.step.step
from jaxtrain.models import BatchNorm
from jaxtrain.step.clip import clip_grad_norm
from jaxtrain.step.loss_scale import dynamic_loss_scale
from parity import AdamW, Case, randomness
from parity.cases import CASES, cnn_bn, gpt2, mlp
from parity.run import check


def faults(case: Case, **settings: object) -> str:
    verdict = check(case, **{"steps": 6, **settings})
    assert not verdict.passed
    return "; ".join(verdict.faults)


@pytest.mark.slow
def test_flaxs_layer_norm_epsilon_is_detected() -> None:
    case = gpt2.case(dataclasses.replace(gpt2.CONFIG, layer_norm_epsilon=1e-6))
    assert "first loss" in faults(case)


def test_the_exact_gelu_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtrain.models.gpt2, "_gelu", partial(jax.nn.gelu, approximate=False))
    assert "first loss" in faults(CASES["gpt2"]())


def test_optaxs_default_weight_decay_is_detected_after_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamW, "jax", property(lambda options: optax.adamw(options.lr)))
    found = faults(mlp.case(side=8, hidden=32))
    assert "params after the first update" in found
    assert "gradient" not in found


def test_a_window_summed_instead_of_averaged_is_detected_in_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    mean_gradient = jaxtrain.step.step.mean_gradient
    summed = lambda window: jax.tree.map(lambda g: 4 * g, mean_gradient(window))  # noqa: E731
    monkeypatch.setattr(jaxtrain.step.step, "mean_gradient", summed)
    found = faults(mlp.case(side=8, hidden=32), accumulate=4)
    assert "gradient" in found
    assert "first loss" not in found


def test_clipping_without_pytorchs_epsilon_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtrain.step.step, "clip_grad_norm", lambda grads, bound: clip_grad_norm(grads, bound + 1e-6))
    assert "exp_avg after the last step" in faults(CASES["mlp"]())


@pytest.mark.slow
def test_adams_epsilon_under_the_root_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def adamw(options: AdamW) -> optax.GradientTransformation:
        b1, b2 = options.betas
        return optax.adamw(options.lr, b1, b2, 0.0, options.eps**2, weight_decay=options.weight_decay)

    monkeypatch.setattr(AdamW, "jax", property(adamw))
    assert "params after the first update" in faults(CASES["gpt2"]())


@pytest.mark.slow
def test_optaxs_float32_bias_correction_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def adamw(options: AdamW) -> optax.GradientTransformation:
        b1, b2 = options.betas
        return optax.adamw(options.lr, b1, b2, options.eps, weight_decay=options.weight_decay)

    monkeypatch.setattr(AdamW, "jax", property(adamw))
    assert "last parameters" in faults(CASES["cnn"](), precision="fp32", steps=20)


@pytest.mark.slow
def test_bfloat16_products_in_a_float32_run_are_detected() -> None:
    case = CASES["mlp"]()
    in_bfloat16 = dataclasses.replace(case, loss_fn=jaxtrain.autocast(case.loss_fn, jnp.bfloat16))
    assert "first gradient" in faults(in_bfloat16, precision="fp32")


@pytest.mark.slow
def test_gradients_left_scaled_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def still_scaled() -> optax.GradientTransformation:
        scaler = dynamic_loss_scale()
        return optax.GradientTransformation(scaler.init, lambda grads, state: (grads, scaler.update(grads, state)[1]))

    monkeypatch.setattr(jaxtrain.step.build, "dynamic_loss_scale", still_scaled)
    assert "first gradient" in faults(CASES["mlp"](), precision="fp16")


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give PyTorch the dropout masks of the next micro-batch."""
    dropout_masks = randomness.dropout_masks

    def rotated(*args: Any, **settings: Any) -> list[randomness.Masks]:
        first, *rest = dropout_masks(*args, **settings)
        return [*rest, first]

    monkeypatch.setattr(randomness, "dropout_masks", rotated)


@pytest.mark.parametrize("make", [mlp.case, cnn_bn.case, pytest.param(gpt2.case, marks=pytest.mark.slow)])
def test_dropout_with_the_key_of_another_micro_batch_is_detected(make: Callable[..., Case], shifted: None) -> None:
    assert "first loss" in faults(make(dropout=0.1), accumulate=2, steps=2)


@pytest.mark.parametrize("make", [mlp.case, cnn_bn.case, pytest.param(gpt2.case, marks=pytest.mark.slow)])
def test_another_dropout_rate_is_detected(make: Callable[..., Case]) -> None:
    case = make(dropout=0.1)
    assert "first loss" in faults(dataclasses.replace(case, torch_model=make(dropout=0.11).torch_model), steps=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [jaxtrain.models.mlp, jaxtrain.models.cnn])
def test_dropout_that_does_not_keep_the_mean_is_detected(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = {jaxtrain.models.mlp: mlp.case, jaxtrain.models.cnn: cnn_bn.case}[model]
    assert check(make(dropout=0.1), steps=1).passed
    dropout = model.dropout
    monkeypatch.setattr(model, "dropout", lambda x, rate, rng: dropout(x, rate, rng) * (1 - rate))
    assert "first loss" in faults(make(dropout=0.1), steps=1)


def running_statistics(momentum: float, bessel: bool):
    def update_running_statistics(self: BatchNorm, mean: jax.Array, var: jax.Array, n: int) -> None:
        new = {"mean": mean, "var": var * (n / (n - 1)) if bessel else var}
        for name, value in new.items():
            running = getattr(self, name)
            running[...] = (1 - momentum) * running[...] + momentum * value
        self.count[...] += 1

    return update_running_statistics


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("momentum", "bessel"), [(0.1, False), (0.9, True)])
def test_flaxs_running_statistics_are_detected_in_the_buffers_only(
    monkeypatch: pytest.MonkeyPatch, momentum: float, bessel: bool
) -> None:
    monkeypatch.setattr(BatchNorm, "_update_running_statistics", running_statistics(0.1, True))
    assert check(CASES["cnn-bn"](), steps=3).passed
    monkeypatch.setattr(BatchNorm, "_update_running_statistics", running_statistics(momentum, bessel))
    verdict = check(CASES["cnn-bn"](), steps=3)
    assert [fault.split(",")[0] for fault in verdict.faults] == ["buffers after the first update"]


@pytest.mark.parametrize(
    ("perturbed", "eps"), [pytest.param("a matrix", 3e-11, marks=pytest.mark.slow), ("one of its 4096 elements", 1e-9)]
)
def test_a_tiny_perturbation_of_a_weight_is_detected(perturbed: str, eps: float) -> None:
    case = gpt2.case()

    def loss_fn(params: dict[str, Any], batch: Any, rng: Any) -> Any:
        blocks = params["blocks"]
        kernel = blocks["fc"]["kernel"]
        kernel = kernel * (1 + eps) if perturbed == "a matrix" else kernel.at[0, 0, 0].multiply(1 + eps)
        return case.loss_fn({**params, "blocks": {**blocks, "fc": {**blocks["fc"], "kernel": kernel}}}, batch, rng)

    assert faults(dataclasses.replace(case, loss_fn=loss_fn), steps=2)
