"""Distances and verdicts of synthetic runs."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parity.compare import float64
from parity.compare.examination import judge
from parity.compare.reference import Reference
from parity.compare.verdict import median, relative, same_meaning, same_precision
from parity.record import Record, Snapshot, Tensors
from parity.settings import Settings


def record(error: float = 0.0, scales: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Record:
    """Return a run of two steps in which every value has a relative `error`."""

    def tensors(scale: float) -> Tensors:
        return {"a": np.arange(1.0, 5.0) * scale * (1 + error), "b": np.ones((2, 3)) * scale * (1 + error)}

    snapshots = [Snapshot(tensors(s), {"mu": tensors(s), "nu": tensors(s)}, tensors(s)) for s in (1.0, 2.0)]
    return Record(np.array([2.0, 1.0]) * (1 + error), tensors(1.0), *snapshots, np.array(scales), np.ones(2))


def test_identical_runs_have_distance_0() -> None:
    verdict = same_meaning(record(), record())
    assert verdict.passed
    assert (verdict.loss_rel, verdict.grad_rel_max, verdict.param_rel_max, verdict.error_ratio) == (0, 0, 0, None)


def test_the_first_update_and_the_last_step_have_separate_bars() -> None:
    assert same_meaning(record(5e-11), record()).passed
    found = same_meaning(record(5e-9), record()).faults
    assert [fault.split(",")[0] for fault in found] == [
        "first loss",
        "gradient",
        *(f"{what} after the first update" for what in ("params", "mu", "nu", "buffers")),
    ]
    assert len(same_meaning(record(5e-8), record()).faults) == 11


@pytest.mark.parametrize("field", ["losses", "grads", "first", "last"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nonfinite_values_fail_on_either_side_and_on_both(field: str, broken: float) -> None:
    bad = dataclasses.replace(record(), **{field: getattr(record(broken), field)})
    for ours, theirs in ((bad, record()), (record(), bad), (bad, bad)):
        assert not same_meaning(ours, theirs).passed


@pytest.mark.parametrize("field", ["losses", "grads", "last"])
def test_nonfinite_values_fail_in_low_precision_too(field: str) -> None:
    bad = dataclasses.replace(record(), **{field: getattr(record(math.nan), field)})
    for ours, theirs in ((bad, record(1e-3)), (record(1e-3), bad), (bad, bad)):
        verdict = same_precision(ours, [theirs], record())
        assert verdict.error_ratio == math.inf
        assert not verdict.passed


def test_a_parameter_whose_gradient_is_noise_is_compared_relative_to_all_parameters() -> None:
    def run(update: float, gradient: float) -> Record:
        grads = {"weight": np.ones(4), "bias": np.full(4, gradient)}
        snapshot = Snapshot({"weight": np.ones(4), "bias": np.full(4, update)}, {}, {})
        return Record(np.array([1.0]), grads, snapshot, snapshot, np.ones(2), np.ones(1))

    assert same_meaning(run(1e-11, 1e-16), run(-1e-11, 1e-16)).passed
    assert not same_meaning(run(1e-7, 1e-16), run(-1e-7, 1e-16)).passed
    # An adapter's gradient is exactly zero before its first update.
    assert not same_meaning(run(1e-11, 0.0), run(-1e-11, 0.0)).passed


def noisy(update: float, noise: float, other: float = 0.5) -> Record:
    """Return a run of a bias whose gradient is zero in mathematics in its second element."""
    grads, snapshot = {"bias": np.array([1.0, noise])}, Snapshot({"bias": np.array([other, update])}, {}, {})
    return Record(np.array([1.0]), grads, snapshot, snapshot, np.ones(2), np.ones(1))


def test_noise_that_the_optimizer_amplifies_may_move_parameters_as_far_as_in_pytorchs_own_runs() -> None:
    theirs, one_ulp = noisy(1e-9, 1e-16), [noisy(2e-9, 2e-16), noisy(1.5e-9, 1.5e-16)]
    honest = noisy(-1e-9, -1e-16)
    assert not same_meaning(honest, theirs).passed
    assert same_meaning(honest, theirs, one_ulp).passed
    bugs = {
        "moved farther than by the noise": noisy(1e-8, -1e-16),
        "moved without noise": noisy(-1e-9, 1e-16),
        "the gradient is no noise": noisy(1e-4, 1e-11),
        "the other element moved": noisy(-1e-9, -1e-16, other=0.5 + 1e-9),
    }
    assert [bug for bug, wrong in bugs.items() if same_meaning(wrong, theirs, one_ulp).passed] == []
    # Gradients that are small but the same in every run are none.
    stable = [noisy(2e-9, 1e-16), noisy(1.5e-9, 1e-16)]
    assert not same_meaning(honest, theirs, stable).passed


def test_a_buffer_may_be_as_far_apart_as_in_pytorchs_own_runs() -> None:
    """The running mean of a batch norm follows a bias before it, whose gradient is rounding noise."""

    def run(mean: float, other: float = 1.0) -> Record:
        first = Snapshot({"w": np.ones(2)}, {}, {"mean": np.array([0.0]), "other": np.array([1.0])})
        last = Snapshot({"w": np.ones(2)}, {}, {"mean": np.array([mean]), "other": np.array([other])})
        return Record(np.ones(2), {"w": np.ones(2)}, first, last, np.ones(3), np.ones(2))

    theirs, one_ulp = run(1.0), [run(1 + 1e-4), run(1 - 2e-4)]
    assert not same_meaning(run(1 + 3e-4), theirs).passed
    assert same_meaning(run(1 + 3e-4), theirs, one_ulp).passed
    assert not same_meaning(run(1 + 5e-4), theirs, one_ulp).passed
    assert not same_meaning(run(1.0, other=1 + 3e-4), theirs, one_ulp).passed
    assert not same_meaning(run(float("nan")), theirs, [run(float("nan"))]).passed


def test_parameters_alone_that_differ_are_compared_again_beside_runs_from_weights_one_ulp_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs, one_ulp = noisy(1e-9, 1e-16), [noisy(2e-9, 2e-16), noisy(1.5e-9, 1.5e-16)]
    asked: list[dict[str, Any]] = []

    def live_reference(case: Any, precision: str, settings: Settings, *coverage: Any, **judged: int) -> Reference:
        asked.append(judged)
        return Reference({}, theirs, [], one_ulp if judged else [], truth=theirs)

    def compared(ours: Record) -> Any:
        asked.clear()
        monkeypatch.setattr(float64, "train", lambda case, program, settings, reference: judge(ours, reference))
        program: Any = SimpleNamespace(precision="fp64")
        return float64.compare("the case", program, Settings(steps=1))  # type: ignore[arg-type]

    monkeypatch.setattr(float64, "live_reference", live_reference)
    monkeypatch.setattr(float64, "_with_other_constants", lambda case, program, examination, settings: examination)
    cases, found = compared(noisy(-1e-9, -1e-16))
    assert (cases, found.verdict.passed, asked) == (["the case"], True, [{}, {"judged": 0}])
    assert found.notes == (
        "parameters whose gradient is rounding noise are as far apart as in PyTorch's runs from weights one ulp off",
    )
    farther = compared(noisy(1e-8, -1e-16))
    assert (farther.verdict.passed, farther.notes, len(asked)) == (False, (), 2)
    # A gradient that differs is no noise.
    assert not compared(noisy(-1e-9, 1e-9)).verdict.passed
    assert asked == [{}]
    assert compared(theirs)[1].notes == ()
    assert asked == [{}]


def test_noise_in_one_part_of_a_complex_number_is_noise_of_that_part_alone() -> None:
    def run(update: complex, gradient: complex) -> Record:
        """Of the weight of a mode, whose imaginary part has no effect in mathematics."""
        snapshot = Snapshot({"w": np.array([0.5 + update])}, {}, {})
        return Record(np.array([1.0]), {"w": np.array([gradient])}, snapshot, snapshot, np.ones(2), np.ones(1))

    theirs, one_ulp = run(1e-9j, 1 + 1e-16j), [run(2e-9j, 1 + 2e-16j), run(1.5e-9j, 1 + 1.5e-16j)]
    assert not same_meaning(run(-1e-9j, 1 - 1e-16j), theirs).passed
    assert same_meaning(run(-1e-9j, 1 - 1e-16j), theirs, one_ulp).passed
    assert not same_meaning(run(1e-9 - 1e-9j, 1 - 1e-16j), theirs, one_ulp).passed


def test_complex_numbers_are_as_far_apart_as_their_difference_is_large() -> None:
    theirs = {"w": np.array([3 + 4j, 0], np.complex64)}
    assert relative({"w": np.array([3 - 4j, 0])}, theirs)["w"] == pytest.approx(8 / 5)
    assert relative({"w": theirs["w"] + 1e-12j}, theirs)["w"] > 1e-13


def test_a_mathematically_zero_tensor_is_compared_relative_to_all_tensors() -> None:
    theirs = {"weight": np.ones(4), "key.bias": np.full(4, 1e-17)}
    assert relative({**theirs, "key.bias": -theirs["key.bias"]}, theirs)["key.bias"] == pytest.approx(2e-17)
    small = {"weight": np.ones(4), "bias": np.full(4, 1e-9)}
    assert relative({**small, "bias": -small["bias"]}, small)["bias"] == pytest.approx(2)


def test_runs_with_different_tensors_raise() -> None:
    with pytest.raises(ValueError, match="bias"):
        relative({"weight": np.ones(1)}, {"weight": np.ones(1), "bias": np.ones(1)})


def test_the_error_ratio_is_relative_to_the_least_accurate_run_of_pytorch() -> None:
    theirs = [record(1e-3), record(-2e-3)]
    assert same_precision(record(4e-3), theirs, record()).error_ratio == pytest.approx(2)
    assert same_precision(record(3.9e-3), theirs, record()).passed
    assert len(same_precision(record(4.1e-3), theirs, record()).faults) == 4


def test_an_exact_run_of_pytorch_allows_the_rounding_of_float32_in_losses_and_gradients() -> None:
    assert same_precision(record(), [record()], record()).error_ratio == 0

    def rounded(error: float) -> Record:
        return dataclasses.replace(record(error), last=record().last)

    assert same_precision(rounded(4e-7), [record()], record()).passed
    assert [fault.split(":")[0] for fault in same_precision(rounded(6e-7), [record()], record()).faults] == [
        "losses",
        "first gradient",
    ]
    assert same_precision(record(1e-12), [record()], record()).error_ratio == math.inf


def test_a_gradient_that_is_zero_in_mathematics_is_measured_by_pytorchs_distance_of_the_whole_gradient() -> None:
    def run(weight: float, bias: float) -> Record:
        grads = {"weight": np.full(60, 1 + weight), "bias": np.full(4, bias)}
        return dataclasses.replace(record(), grads=grads)

    verdict = same_precision(run(1e-3, 2e-3), [run(1e-3, 0)], run(0, 0))
    ratios = {tensor.what: tensor.ratio for tensor in verdict.tensors}
    assert ratios["gradient of weight"] == pytest.approx(1)
    assert ratios["gradient of bias"] == pytest.approx(2 * math.sqrt(64 / 60))


def test_loss_scales_must_be_equal() -> None:
    ours, theirs = record(1e-3, (8.0, 4.0, 4.0)), record(1e-3, (8.0, 8.0, 4.0))
    assert same_precision(ours, [theirs], record()).faults == ("loss scale after step 1: 4, PyTorch's 8",)
    assert (ours.skipped, theirs.skipped) == ({0}, {1})


def test_the_median_verdict_tolerates_two_failures_of_five_but_not_three() -> None:
    held, failed = (same_precision(record(e), [record(1e-3)], record()) for e in (1e-3, 1.0))
    assert median([failed, held, held, failed, held]).passed
    assert not median([failed, held, failed, failed, held]).passed
