"""Deliberate bugs are caught and located, and clean cases raise no alarm."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jaxtrain.errors import UserError
from jaxtrain.step import accumulate, clip_grad_norm
from parity.mutate import Outcome, clean_runs, document, main, mutants_in, outcomes, patched
from parity.mutate.planting import _CleanVerdicts, _outcome
from tests.parity.mutants import MUTANTS

DEFAULT = [
    "layer-norm-eps",
    "window-off-by-one",
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
NOT_LOCATED = {"unused-parameter-decays", "cross-entropy-label-smoothing-dropped"}
"""Mutants without a location: PyTorch has no such operation, or JAX computes it on one line with correct ones."""


CLEAN = _CleanVerdicts()
"""Verdicts on the cases without a bug, which many mutants share."""


def planted(name: str, located: bool = True) -> Outcome:
    return _outcome(MUTANTS[name], CLEAN, located)


@pytest.mark.parametrize("name", DEFAULT)
def test_a_mutant_is_caught_and_located_and_its_clean_case_passes(name: str) -> None:
    outcome = planted(name)
    assert (outcome.caught, outcome.clean) == (True, True)
    assert outcome.located is not False


OTHERS = [name for name in MUTANTS if name not in DEFAULT]
OF_EACH_CASE = {MUTANTS[name].clean: name for name in reversed(OTHERS)}.values()
"""The first mutant of each case; the others of the case are located nightly."""


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_mutant_is_caught(name: str) -> None:
    outcome = planted(name, located=name in OF_EACH_CASE)
    assert (outcome.caught, outcome.clean) == (True, True), outcome
    assert outcome.located is not False or name in NOT_LOCATED, outcome


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in OTHERS if name not in OF_EACH_CASE])
def test_every_other_mutant_is_located(name: str) -> None:
    assert planted(name).located is not False or name in NOT_LOCATED


@pytest.mark.parametrize(
    ("n", "seed"),
    [(30, 0), pytest.param(1070, 30, marks=pytest.mark.nightly)],
)
def test_clean_runs_raise_no_alarm(n: int, seed: int) -> None:
    assert [verdict.faults for verdict in clean_runs([*MUTANTS.values()], n, seed) if not verdict.passed] == []


def test_patching_a_function_that_the_module_lacks_raises() -> None:
    with pytest.raises(AttributeError, match=r"jaxtrain.step.accumulate has no clip_grad_norm"):
        patched(clip_grad_norm, None, within=accumulate)


def test_what_is_no_factory_is_refused() -> None:
    with pytest.raises(UserError, match=r"adam-eps is no FILE.py::FACTORY: give a function"):
        mutants_in(["adam-eps"])


def test_the_outcomes_are_written_as_json(tmp_path: Path) -> None:
    written = tmp_path / "mutants.json"
    console = Console(file=io.StringIO())
    assert main([MUTANTS["leaky-relu-slope"]], written, console) == 0
    assert console.file.getvalue().startswith("leaky-relu-slope caught, located\n")
    expected = json.loads(written.read_text())
    (mutant,) = expected.pop("mutants")
    assert expected == {"caught": 1, "total": 1, "clean_runs": 1, "false_alarms": 0}
    assert mutant.pop("loss_rel") > 0.01 < mutant.pop("grad_rel_max")
    assert mutant == {"name": "leaky-relu-slope", "case": "layer", "caught": True, "located": True}


def test_mutants_of_one_clean_case_share_its_verdict_and_it_counts_once() -> None:
    found = [*outcomes((MUTANTS[x] for x in ("adam-eps", "adam-eps-in-the-root", "adamax-is-adam")), located=False)]
    assert [outcome.clean_runs for outcome in found] == [1, 0, 1]
    assert all(outcome.clean and outcome.caught for outcome in found)
    assert document(found)["clean_runs"] == 2


def test_the_document_of_no_mutants_counts_nothing() -> None:
    assert document([]) == {"mutants": [], "caught": 0, "total": 0, "clean_runs": 0, "false_alarms": 0}
