"""Training in JAX equals training in PyTorch, for every built-in case."""

from typing import Any

import pytest

from parity import check
from parity.cases import CASES

FEW = ("mlp", "cnn-bn")
LONG = {
    *("bert", "bert.classifier", "cnn", "llama", "llama.mistral", "llama.packed", "llama.qwen3", "lora", "migration"),
    *("mixtral", "resnet", "resnet.bottleneck", "t5", "t5.gated", "vit"),
}


# Each has a smaller case of its family in the slow tier.
LONGEST = {
    *("bert.classifier", "llama.mistral", "llama.packed", "llama.qwen3", "resnet", "resnet.bottleneck", "t5.gated"),
    "migration",  # in tests/parity/test_migration.py
}


def slow(case: str) -> Any:
    mark = pytest.mark.nightly if case in LONGEST else pytest.mark.slow
    return pytest.param(case, marks=[mark] * (case in LONG))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [slow(case) for case in CASES])
def test_in_float64_the_runs_are_equal(case: str) -> None:
    assert_same(case, accumulate=4, remat="full")


# The longest train with accumulation and remat, above.
@pytest.mark.sampled(0, slow=8)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.nightly] * (case in LONG and case not in FEW)) for case in CASES],
)
def test_in_float64_the_runs_are_equal_without_accumulation_and_remat(case: str) -> None:
    assert_same(case, accumulate=1, remat="none")


def assert_same(case: str, **settings: Any) -> None:
    verdict = check(CASES[case](), **settings)
    assert verdict.passed, verdict.faults
    assert max(verdict.loss_rel, verdict.grad_rel_max) < 1e-12
    assert verdict.error_ratio is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "precision", "accumulate"),
    [
        ("mlp", "bf16", 1),
        pytest.param("mlp", "fp32", 4, marks=pytest.mark.nightly),
        ("mlp", "fp16", 4),
        pytest.param("cnn", "fp32", 1, marks=pytest.mark.nightly),
        pytest.param("cnn", "bf16", 4, marks=pytest.mark.nightly),
        ("cnn", "fp16", 1),
        ("cnn-bn", "fp32", 4),
        pytest.param("cnn-bn", "bf16", 1, marks=pytest.mark.nightly),
        ("cnn-bn", "fp16", 4),
        pytest.param("gpt2", "fp32", 1, marks=pytest.mark.nightly),
        # In tests/parity/test_matrix.py, too.
        pytest.param("gpt2", "bf16", 4, marks=pytest.mark.nightly),
        pytest.param("gpt2", "fp16", 1, marks=pytest.mark.nightly),
        ("mlp", "bf16_params", 4),
        pytest.param("cnn-bn", "bf16_params", 1, marks=pytest.mark.slow),
        pytest.param("gpt2", "bf16_params", 4, marks=pytest.mark.nightly),
        # By Kahan's sums against float32 masters: tests/parity/test_param_rounding.py.
        pytest.param("gpt2", "bf16_params_kahan", 4, marks=pytest.mark.nightly),
        pytest.param("cnn-bn", "bf16_params_stochastic", 1, marks=pytest.mark.slow),
        ("mlp", "bf16_compute", 4),
        *(
            pytest.param(case, "bf16_compute", k, marks=pytest.mark.slow)
            for case, k in {"llama": 1, "cnn-bn": 4}.items()
        ),
        *(
            pytest.param(case, "bf16_compute", k, marks=pytest.mark.nightly)
            for case, k in {"gpt2": 4, "bert": 1, "vit": 4, "resnet": 1, "t5": 1}.items()
        ),
        pytest.param("llama", "bf16", 4, marks=pytest.mark.nightly),
        pytest.param("llama.qwen3", "fp16", 1, marks=pytest.mark.nightly),
        pytest.param("mixtral", "bf16", 1, marks=pytest.mark.nightly),
        pytest.param("t5", "fp16", 4, marks=pytest.mark.nightly),
        pytest.param("t5", "fp16", 1, marks=pytest.mark.nightly),
        pytest.param("t5.gated", "bf16", 1, marks=pytest.mark.nightly),
        pytest.param("bert", "fp16", 4, marks=pytest.mark.slow),
        pytest.param("vit", "bf16", 1, marks=pytest.mark.slow),
        pytest.param("resnet", "bf16", 1, marks=pytest.mark.nightly),
        pytest.param("lora", "bf16", 4, marks=pytest.mark.nightly),
        pytest.param("migration", "fp32", 4, marks=pytest.mark.nightly),
        ("losses.chunked-cross-entropy", "bf16", 4),
        ("losses.clip", "fp16", 1),
    ],
)
def test_in_low_precision_jax_is_as_accurate_as_pytorch(case: str, precision: str, accumulate: int) -> None:
    verdict = check(CASES[case](), precision, accumulate=accumulate)
    assert verdict.passed, verdict.faults
    assert verdict.error_ratio <= 2
    assert verdict.loss_rel > 1e-9, "nothing was computed in low precision"
