"""The claim itself: training in JAX is training in PyTorch."""

import pytest

from parity import check
from parity.cases import CASES


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("accumulate", "remat"), [(1, "none"), (4, "full")])
def test_in_float64_the_runs_mean_the_same(case: str, accumulate: int, remat: str) -> None:
    verdict = check(CASES[case](), accumulate=accumulate, remat=remat)
    assert verdict.passed, verdict.faults
    assert max(verdict.loss_rel, verdict.grad_rel_max) < 1e-12
    assert verdict.error_ratio is None


@pytest.mark.parametrize(
    ("case", "precision", "accumulate"),
    [
        ("mlp", "fp32", 4),
        ("mlp", "bf16", 1),
        ("mlp", "fp16", 4),
        ("cnn", "fp32", 1),
        ("cnn", "bf16", 4),
        ("cnn", "fp16", 1),
        ("cnn-bn", "fp32", 4),
        ("cnn-bn", "bf16", 1),
        ("cnn-bn", "fp16", 4),
        ("gpt2", "fp32", 1),
        ("gpt2", "bf16", 4),
        ("gpt2", "fp16", 1),
        ("mlp", "bf16_params", 4),
        ("cnn-bn", "bf16_params", 1),
        ("gpt2", "bf16_params", 4),
    ],
)
def test_in_low_precision_jax_is_as_near_the_truth_as_pytorch(case: str, precision: str, accumulate: int) -> None:
    verdict = check(CASES[case](), precision, accumulate=accumulate)
    assert verdict.passed, verdict.faults
    assert verdict.error_ratio <= 2
    assert verdict.loss_rel > 1e-9, "nothing was computed in low precision"
