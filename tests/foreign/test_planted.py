"""Bugs planted in published ports are caught and located."""

import pytest

from tests.foreign import MARKS
from tests.foreign.planted import BUGS, examine_bug

pytestmark = MARKS

OFTEN = ("eps", "tanh GELU", "gate and up exchanged", "norm over the wrong axis", "position offset")
"""Bugs that every run of the slow tests plants; the nightly tests plant all."""
LATE = ("gpt2: erf GELU",)
"""Bugs located in the next block: they change small activations by less than the fingerprint's tolerance."""


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=[pytest.mark.nightly] * (bug.name not in OFTEN), id=f"{bug.port}: {bug.name}")
        for bug in BUGS
    ],
)
def test_a_bug_is_caught_and_located(bug):
    outcome = examine_bug(bug)
    assert outcome.caught
    assert outcome.located or f"{bug.port}: {bug.name}" in LATE, outcome.report
