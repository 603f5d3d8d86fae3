"""Deliberate bugs are caught and located, and clean cases raise no alarm."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from jaxtrain.errors import UserError
from jaxtrain.step import accumulate, clip_grad_norm
from parity.mutants import MUTANTS
from parity.mutants.mutant import patched
from parity.mutate import clean_runs, document, main, mutate

FEW = [
    "layer-norm-eps",
    "batch-norm-running-variance-biased",
    "attention-causal-off-by-one",
    "dropout-unscaled",
    "abs-at-0",
    "cross-entropy-mean-over-all",
    "adam-eps",
    "cosine-stays-at-the-end",
    "clip-without-the-epsilon",
    "window-summed",
]
NOT_PLACED = {"unused-parameter-decays", "cross-entropy-label-smoothing-dropped"}
"""PyTorch does nothing there, or JAX computes it in one line with what is right."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FEW)
def test_a_bug_is_caught_and_located_and_its_absence_is_clean(name: str) -> None:
    (outcome,) = mutate([name])
    assert (outcome.caught, outcome.clean) == (True, True)
    assert outcome.located is not False


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - set(FEW)))
def test_every_other_bug_is_too(name: str) -> None:
    (outcome,) = mutate([name])
    assert (outcome.caught, outcome.clean) == (True, True), outcome
    assert outcome.located is not False or name in NOT_PLACED, outcome


@pytest.mark.slow
def test_a_hundred_clean_runs_raise_no_alarm() -> None:
    assert [verdict.faults for verdict in clean_runs(100) if not verdict.passed] == []


def test_a_patch_of_a_function_that_a_module_does_not_have_is_refused_when_it_is_made() -> None:
    with pytest.raises(AttributeError, match=r"jaxtrain.step.accumulate has no clip_grad_norm"):
        patched(clip_grad_norm, None, within=accumulate)


def test_there_are_at_least_sixty_mutants() -> None:
    assert len(MUTANTS) >= 60


def test_an_unknown_mutant_is_named() -> None:
    with pytest.raises(UserError, match="unknown mutant nonsense"):
        mutate(["nonsense"])


def test_the_outcomes_are_written(tmp_path: Path) -> None:
    written = tmp_path / "mutants.json"
    assert main(["leaky-relu-slope"], written, Console(quiet=True)) == 0
    expected = json.loads(written.read_text())
    (mutant,) = expected.pop("mutants")
    assert expected == {"caught": 1, "total": 1, "clean_runs": 1, "false_alarms": 0}
    assert mutant.pop("loss_rel") > 0.01 < mutant.pop("grad_rel_max")
    assert mutant == {"name": "leaky-relu-slope", "case": "layer", "caught": True, "located": True}


def test_mutants_of_one_clean_case_share_its_verdict_and_it_counts_once() -> None:
    found = mutate(["adam-eps", "adam-eps-in-the-root", "adamax-is-adam"], located=False)
    assert [outcome.clean_runs for outcome in found] == [1, 0, 1]
    assert all(outcome.clean and outcome.caught for outcome in found)
    assert document(found)["clean_runs"] == 2


def test_the_document_of_no_mutants_counts_nothing() -> None:
    assert document([]) == {"mutants": [], "caught": 0, "total": 0, "clean_runs": 0, "false_alarms": 0}
