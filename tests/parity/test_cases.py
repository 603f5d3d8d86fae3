"""Training in JAX equals training in PyTorch, for every built-in case."""

from typing import Any

import pytest

from parity import check
from parity.cases import CASES
from tests.parity.both_sides import distances, in_pytorch


@pytest.mark.parametrize("case", CASES)
def test_in_float64_the_runs_are_equal(case: str) -> None:
    assert_same(case, accumulate=4, remat="full")


@pytest.mark.parametrize("case", CASES)
def test_in_float64_the_runs_are_equal_without_accumulation_and_remat(case: str) -> None:
    assert_same(case, accumulate=1, remat="none")


def test_losses_and_gradients_of_small_cases_equal_pytorchs() -> None:
    names = [name for name in CASES if name.startswith(("losses.", "autograd.", "gradient-penalty", "maml"))]
    cases = [CASES[name]() for name in names]
    found = dict(zip(names, distances(cases, [*map(in_pytorch, cases)], graded=True), strict=True))
    assert max(found.values()) < 1e-9, found


def assert_same(case: str, **settings: Any) -> None:
    verdict = check(CASES[case](), **settings)
    assert verdict.passed, verdict.faults
    assert max(verdict.loss_rel, verdict.grad_rel_max) < 1e-12
    assert verdict.error_ratio is None


@pytest.mark.parametrize(
    ("case", "precision", "accumulate"),
    [
        ("mlp", "bf16", 1),
        ("mlp", "fp32", 4),
        ("mlp", "fp16", 4),
        ("cnn", "fp32", 1),
        ("cnn", "bf16", 4),
        ("cnn", "fp16", 1),
        ("cnn-bn", "fp32", 4),
        ("cnn-bn", "bf16", 1),
        ("cnn-bn", "fp16", 4),
        ("gpt2", "fp32", 1),
        # In tests/parity/test_matrix.py, too.
        ("gpt2", "bf16", 4),
        ("gpt2", "fp16", 1),
        ("mlp", "bf16_params", 4),
        ("cnn-bn", "bf16_params", 1),
        ("gpt2", "bf16_params", 4),
        # By Kahan's sums against float32 masters: tests/parity/test_param_rounding.py.
        ("gpt2", "bf16_params_kahan", 4),
        ("cnn-bn", "bf16_params_stochastic", 1),
        ("mlp", "bf16_compute", 4),
        *((case, "bf16_compute", k) for case, k in {"llama": 1, "cnn-bn": 4}.items()),
        *((case, "bf16_compute", k) for case, k in {"gpt2": 4, "bert": 1, "vit": 4, "resnet": 1, "t5": 1}.items()),
        ("llama", "bf16", 4),
        ("llama.qwen3", "fp16", 1),
        ("mixtral", "bf16", 1),
        ("t5", "fp16", 4),
        ("t5", "fp16", 1),
        ("t5.gated", "bf16", 1),
        ("bert", "fp16", 4),
        ("vit", "bf16", 1),
        ("resnet", "bf16", 1),
        ("lora", "bf16", 4),
        ("migration", "fp32", 4),
        ("losses.chunked-cross-entropy", "bf16", 4),
        ("losses.clip", "fp16", 1),
    ],
)
def test_in_low_precision_jax_is_as_accurate_as_pytorch(case: str, precision: str, accumulate: int) -> None:
    verdict = check(CASES[case](), precision, accumulate=accumulate)
    assert verdict.passed, verdict.faults
    assert verdict.error_ratio <= 2
    assert verdict.loss_rel > 1e-9, "nothing was computed in low precision"
