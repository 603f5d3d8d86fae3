"""The proof notices what is wrong in the files of a ported script, and says at which line."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.port.data import keep_loaders
from jaxtrain.port.ported import Ported, ported
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from jaxtrain.port.write import write
from jaxtrain.run import load_recipe
from parity.explain.first_statement import first_statement
from parity.ported import ported_case, prove

from .loops import changed, line_of, written_port
from .planted_files import MATERIAL, Bug, drawn


class Outcome(NamedTuple):
    """What the proof says of a bug.

    Attributes:
      bug: The bug.
      is_noticed: Whether the files are not equal.
      is_placed: Whether a line of the proof names the statement, or the setting.
      lines: The lines.
    """

    bug: Bug
    is_noticed: bool
    is_placed: bool
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n    ".join([str(self.bug), *self.lines])


def outcomes(name: str, count: int, folder: Path) -> Iterator[Outcome]:
    """Yield what the proof says of bugs in the files of a script."""
    path = MATERIAL[name](folder)
    recording = record(path, [], 20)
    keep_loaders(path, [], [found.loader for found in recording.loaders])
    training = understood(recording)
    check_rerun(training)
    result = ported(training)
    write(result, path, [], folder)
    assert prove(result, folder, name).passed
    right = program(result, folder)
    found = 0
    for number, bug in enumerate(drawn(folder, name, 4 * count)):
        file, run = folder / bug.file, folder / "run.py"
        texts = {run: run.read_text(), file: file.read_text()}
        run.write_text(f"{texts[run]}# {number}\n")  # files are imported once for each content
        file.write_text(f"{bug.text}# {number}\n")
        try:
            outcome = outcome_of(bug, result, folder, right)
        finally:
            for changed, text in texts.items():
                changed.write_text(text)
        if outcome is not None:
            yield outcome
            found += 1
        if found == count:
            return


def outcome_of(bug: Bug, result: Ported, folder: Path, right: str) -> Outcome | None:
    """Return what the proof says of a bug; None for a program that is as it was, or that fails by itself."""
    try:
        if program(result, folder) == right:
            return None
    except Exception:
        return None
    try:
        proof = prove(result, folder, "planted")
    except UserError as error:  # of dropout masks that do not fit
        return Outcome(bug, True, is_placed(bug, [str(error)]), [str(error)])
    return Outcome(bug, not proof.passed, is_placed(bug, proof.lines), proof.lines)


def program(result: Ported, folder: Path) -> str:
    """Return the settings of a recipe, and losses and gradients at random parameters, as text."""
    recipe = load_recipe(f"{folder / 'run.py'}::Run")[1]
    case, rng = ported_case(result, folder, "planted"), np.random.default_rng(0)
    params = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in case.params_like.items()}
    state = [] if case.state_like is None else [{n: np.ones(x.shape, x.dtype) for n, x in case.state_like.items()}]

    def loss(params: Any, micro: Any) -> Any:
        total, *rest = case.loss_fn(params, micro, jax.random.key(0), *state)
        return total.total, (total.weight, rest)

    found = [str(recipe)]
    for window in case.windows[:4]:
        rows = len(next(iter(window.values()))) // recipe.accumulate
        numbers = jax.value_and_grad(loss, has_aux=True)(params, {name: x[-rows:] for name, x in window.items()})
        found += [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(numbers)]
    return " ".join(found)


def is_placed(bug: Bug, lines: Sequence[str]) -> bool:
    """Return whether lines name the statement or the setting of a bug."""
    name = Path(bug.file).name
    places = [f"{name}:{number}:" for number in bug.lines]
    named = [f"{bug.setting} is "] if bug.setting else []
    return any(text in line for line in lines for text in (*places, *named))


KINDS = {
    "groups": ("model.py", "BUFFERS if state is None else {**BUFFERS, **state}", "BUFFERS"),
    "feed": ("model.py", "F.dropout(y, 0.2, next(keys))", "F.dropout(y, 0.2, None)"),
    "duel": ("turn_2/model.py", "fake = jax.lax.stop_gradient(fake)", "fake = fake"),
}
"""A change that no equation has the line of: of a value that no gradient reaches, of a draw, of a gradient alone."""


@pytest.mark.parametrize("name", KINDS)
def test_the_first_statement_that_differs_is_found(tmp_path: Path, name: str) -> None:
    name_of_file, old, new = KINDS[name]
    result, file = written_port(MATERIAL[name](tmp_path), 8), tmp_path / name_of_file
    case = ported_case(result, tmp_path, name)
    k = result.training.accumulate
    assert first_statement(case, tmp_path, accumulate=k, steps=3) is None
    place = line_of(file, old)
    with changed(file, old, new):
        try:
            lines = prove(result, tmp_path, name).lines
        except UserError as error:  # of a draw
            lines = (str(error),)
    assert any(f"{place}:" in line for line in lines), lines


@pytest.mark.parametrize("name", ["groups", "duel"])
def test_some_bugs_are_noticed(tmp_path: Path, name: str) -> None:
    found = [*outcomes(name, 2, tmp_path)]
    assert not [str(outcome) for outcome in found if not outcome.is_noticed]
    assert any(outcome.is_placed for outcome in found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MATERIAL)
def test_bugs_are_noticed_and_most_are_placed(tmp_path: Path, name: str) -> None:
    found = [*outcomes(name, 10, tmp_path)]
    assert len(found) == 10
    assert not [str(outcome) for outcome in found if not outcome.is_noticed]
    assert sum(outcome.is_placed for outcome in found) >= 9
