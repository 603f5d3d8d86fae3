"""JAX's fp8 training against PyTorch's: the same quantization, asked in float64, and the same precision."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from parity.bars import FP8_RATIO_BAR
from parity.case import Case
from parity.cases.built_in import gpt2_case, llama_case, vit_case
from parity.compare.examination import Examination
from parity.run import check, examine
from parity.settings import EXACT, FP8
from parity.sides import torch_fp8
from tests.parity.mutants.fp8 import perceptron

# Llama without padding: what attention returns for padding, 0 or a mean, is a part of the largest magnitude.
CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2_case.case,
    "llama": partial(llama_case.sized, "llama", llama_case.LLAMA, packed=True, clip_norm=1.4),
    "vit": vit_case.case,
}
TRANSFORMERS = [("gpt2", "fp8_delayed"), ("vit", "fp8_block"), ("gpt2", "fp8"), ("llama", "fp8_row")]


@pytest.mark.parametrize("precision", FP8)
def test_a_perceptron_quantizes_as_pytorch_does_to_the_bars_of_float64(precision: str) -> None:
    verdict = check(perceptron(), EXACT + precision, steps=3)
    assert verdict.passed, verdict.faults


@pytest.mark.parametrize(("name", "precision"), TRANSFORMERS)
def test_a_transformer_quantizes_as_pytorch_does_to_the_bars_of_float64(name: str, precision: str) -> None:
    verdict = check(CASES[name](), EXACT + precision, steps=5)
    assert verdict.passed, verdict.faults


@pytest.mark.nightly
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("name", CASES)
def test_every_transformer_quantizes_as_pytorch_does_in_windows_too(name: str, precision: str, accumulate: int) -> None:
    verdict = check(CASES[name](), EXACT + precision, steps=20, accumulate=accumulate, remat="full")
    assert verdict.passed, verdict.faults


def held(name: str, precision: str) -> Examination:
    examination = examine(CASES[name](), precision, steps=20)
    assert examination.verdict.passed, examination.verdict.faults
    assert examination.verdict.error_ratio <= FP8_RATIO_BAR
    return examination


def test_gpt2_in_fp8_is_as_close_to_the_truth_as_torchao_is() -> None:
    held("gpt2", "fp8")


@pytest.mark.nightly
@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("name", CASES)
def test_every_transformer_in_fp8_is_as_close_to_the_truth_as_pytorch_is(name: str, precision: str) -> None:
    held(name, precision)


@pytest.mark.parametrize("recipe", torch_fp8.RECIPES)
def test_emulated_products_of_torchao_equal_those_of_scaled_mm_to_the_bit(recipe: str) -> None:
    def gradients(emulate: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, weight = torch.randn(48, 32, requires_grad=True), torch.randn(32, 64, requires_grad=True)
        product = torch_fp8._torchao_product(torch_fp8._config(recipe, emulate=emulate))
        y = product(x.bfloat16(), weight)
        y.backward(torch.randn_like(y))
        return [y, x.grad, weight.grad]

    for emulated, real in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(emulated, real)
