"""Parity checks as tests, in a separate pytest process."""

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import dataclasses
import pytest
from parity.cases.built_in.autograd_case import cubic

@pytest.mark.parity(precision=["fp64", "fp32"])
def test_held():
    return cubic()

@pytest.fixture
def factor():
    return 1.1

@pytest.mark.parity(steps=2)
def test_differs(factor):
    case = cubic()
    return dataclasses.replace(case, loss_fn=lambda p, b, r: case.loss_fn({"x": factor * p["x"]}, b, r))

@pytest.mark.parity
def test_no_case():
    return 3

def test_plain():
    pass
"""


IN_FP8 = """
import pytest
from tests.parity.mutants.fp8 import perceptron

@pytest.mark.parity(precision=["fp8", "fp8_delayed", "fp64_fp8_delayed"], accumulate=2, steps=3)
def test_held():
    return perceptron()
"""


@pytest.mark.nightly
def test_products_in_8_bits_are_checked_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(IN_FP8)
    ran = pytester.runpytest_subprocess("-n0", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=1)
    ran.stdout.fnmatch_lines(["perceptron*fp8 *k=2*held", "perceptron*fp8_delayed*k=2*held"])
    ran.stdout.fnmatch_lines(["perceptron*fp64_fp8_delayed*k=2*gradients*held"])


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.nightly)])
def test_marked_tests_are_checked_and_summarized(pytester: pytest.Pytester, workers: str) -> None:
    pytester.makepyfile(TESTS)
    ran = pytester.runpytest_subprocess("-n", workers, "--parity-json", "found.json", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=2, failed=2)
    ran.stdout.fnmatch_lines(["*= parity =*", "autograd.cubic*fp64*k=1*held", "autograd.cubic*fp64*k=1*DIFFERS"])
    ran.stdout.fnmatch_lines(["*autograd.cubic fp64: first loss, step 1: *", "*in JAX: *factor*"])
    ran.stdout.fnmatch_lines(["*test_no_case returned int: a test marked parity must return a parity.Case*"])
    written = json.loads(Path(pytester.path, "found.json").read_text())
    assert (written["passed"], written["failed"]) == (2, 1)
    assert {row["precision"] for row in written["cases"]} == {"fp64", "fp32"}
    assert "jax" in written["environment"]
