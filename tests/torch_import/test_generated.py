"""Modules of random statements are right or refused with a line of theirs, never silently wrong."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.torch_import.generated import STATEMENTS, Draw, failed, outcome, source, valid

OPERANDS = st.integers(0, 5)
DRAWS = st.lists(st.tuples(st.integers(0, len(STATEMENTS) - 1), OPERANDS, OPERANDS), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def hold(draws: Sequence[Draw], train: bool, dtype: torch.dtype, folder: Path) -> None:
    assume(valid(draws, train=train))
    found = outcome(draws, folder, train=train, dtype=dtype)
    assert not failed(found), f"{found}\n{source(draws)}"


@pytest.mark.slow
@pytest.mark.parametrize("statement", range(len(STATEMENTS)))
def test_every_statement_is_right_or_refused(statement: int, folder: Path) -> None:
    train = statement % 2 == 0
    hold([(statement, 0, 1)], train or not valid([(statement, 0, 1)], train=True), torch.float32, folder)


@pytest.mark.nightly
@settings(max_examples=3000, suppress_health_check=[*HealthCheck])
@given(draws=DRAWS, train=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_programs_of_random_statements_are_right_or_refused(
    draws: list[Draw], train: bool, dtype: torch.dtype, folder: Path
) -> None:
    hold(draws, train, dtype, folder)


test_some_programs_of_random_statements_are_right_or_refused = pytest.mark.slow(
    settings(max_examples=20, suppress_health_check=[*HealthCheck])(
        given(draws=DRAWS, train=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32]))(hold)
    )
)
