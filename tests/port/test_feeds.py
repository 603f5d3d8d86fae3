"""Scripts that give their batches themselves: carried state, numbers that differ, rates by hand, uneven windows."""

import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.port import ScriptBatches
from jaxtrain.port.cut import Feed
from jaxtrain.port.fed import check_fed
from jaxtrain.port.kept_files import kept_files
from jaxtrain.port.ported import ported
from jaxtrain.port.recipe_source import INPUTS
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.training import Training
from jaxtrain.port.understand import understood
from jaxtrain.port.write import write
from parity.ported import prove

from .feeds import feed
from .loops import changed, line_of, script, written_port


def trained(path: Path, updates: int = 14) -> Training:
    return understood(record(path, [], updates))


@pytest.mark.parametrize("number", range(40))
def test_a_generated_script_is_understood_to_the_bit(tmp_path: Path, number: int) -> None:
    path = feed(tmp_path, number)
    text = path.read_text()
    training = trained(path)
    check_rerun(training)
    assert training.cut is not None
    assert Feed.of_json(training.feed().as_json()) == training.feed()
    names = {root.name for root in training.cut.roots if root.kind == "input"}
    assert {"x", "y"} <= names
    assert bool(training.cut.carried) == ("hidden = detached(hidden)" in text)
    is_none = "return None" in text and "hidden = detached(hidden)" in text
    assert bool(training.cut.first_states) == is_none
    assert [number.name for number in training.cut.numbers] == (["beta"] if "beta" in text else [])
    assert training.cut.rates == (("rate",) if "group['lr']" in text else ())
    assert training.accumulate == (2 if "loss / 2" in text else 1)
    # Nine micro-batches an epoch, of which two make an update where `step` is odd.
    assert training.cut.window == 0
    assert ("noise" in names) == ("noise" in text)
    assert ("mask" in names) == ("mask" in text)


@pytest.mark.parametrize("number", [*range(5), 8])
def test_the_script_gives_what_was_recorded_whatever_its_model_computes(tmp_path: Path, number: int) -> None:
    path = feed(tmp_path, number)
    text = path.read_text().replace(", self.training)", ", False)")  # whose masks would be drawn in between
    path.write_text(text)
    training = trained(path)
    assert training.cut is not None
    (tmp_path / INPUTS).write_text(training.feed().as_json())
    check_fed(training, path, [], tmp_path)
    recorded = [micro for _, window in training.windows() for micro in window]
    given = [*itertools.islice(ScriptBatches(path, [], tmp_path / INPUTS), len(recorded))]
    for ours, theirs in zip(given, recorded, strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in ours.items():
            assert np.array_equal(x, theirs[name].numpy()), name


@pytest.mark.parametrize("number", [1, 4, 9])
def test_the_written_files_are_the_script(tmp_path: Path, number: int) -> None:
    path = feed(tmp_path, number)
    training = trained(path, 8)
    result = ported(training)
    write(result, path, [], tmp_path)
    proof = prove(result, tmp_path, "feed")
    assert proof.passed, proof.lines


def test_losses_of_several_calls_of_backward_are_added(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        model="model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))",
        forward="out = model(x); loss = criterion(out, y)",
        backward="loss.backward(retain_graph=True); (0.3 * out.square().mean()).backward()",
    )
    path.write_text(path.read_text().replace("batch_size=8,", "batch_size=8, drop_last=True,"))
    training = trained(path, 8)
    check_rerun(training)
    assert training.cut is not None
    assert training.cut.is_joined
    result = ported(training)
    write(result, path, [], tmp_path)
    check_fed(training, path, [], tmp_path)
    assert prove(result, tmp_path, "several").passed
    with changed(tmp_path / "model.py", "0.3", "0.31"):
        assert not prove(result, tmp_path, "several").passed


def test_a_state_that_begins_as_zeros_is_carried(tmp_path: Path) -> None:
    """The first one is made by functions that know nothing of the model."""
    path = script(
        tmp_path,
        model="model = nn.LSTM(6, 3); states = torch.zeros(1, 8, 3), torch.zeros(1, 8, 3)",
        forward="states = [state.detach() for state in states]\n"
        "        out, states = model(torch.randn(2, 8, 6), states); loss = out.square().mean()",
        end="states = torch.zeros(1, 8, 3), torch.zeros(1, 8, 3)",
    )
    path.write_text(path.read_text().replace("for i, (x, y) in enumerate(loader):", "for i in range(7):"))
    training = trained(path)
    check_rerun(training)
    assert training.cut is not None
    assert len(training.cut.carried) == 2
    flags = [bool(micro["is_carried"]) for _, window in training.windows() for micro in window]
    assert flags == [i % 7 > 0 for i in range(14)]


def test_an_input_may_require_a_gradient(tmp_path: Path) -> None:
    """As the real images of a gradient penalty do."""
    path = script(
        tmp_path,
        forward="real = torch.autograd.Variable(x, requires_grad=True); out = model(real)\n"
        "        slope = torch.autograd.grad(out.sum(), real, create_graph=True)[0]\n"
        "        loss = criterion(out, y) + slope.square().mean()",
    )
    path.write_text(path.read_text().replace("batch_size=8,", "batch_size=8, drop_last=True,"))
    result = written_port(path, 8, is_fed=False)
    assert prove(result, tmp_path, "slope").passed


BUGS = {
    "rate": ('batch.pop("rate")', '2 * batch.pop("rate")'),
    "padding": ("loss = port.unless", "port.unless"),
    "state of a filled window": ("new_state = port.unless", "port.unless"),
    "weight of a window": ("1 / 3", "1 / 2"),
}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("uneven")
    path = script(
        folder,
        model="model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))",
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        backward="(loss / 3).backward()",
        step="if i % 3 == 2 or i == 6:\n"
        "            optimizer.param_groups[0]['lr'] = 0.1 / (i + epoch); optimizer.step(); optimizer.zero_grad()",
    )
    path.write_text(path.read_text().replace("batch_size=8,", "batch_size=8, drop_last=True,").replace("(50", "(56"))
    result = written_port(path, 8, is_fed=False)
    return result, folder


def test_windows_of_differing_length_are_filled_up(uneven) -> None:
    result, folder = uneven
    assert result.training.cut.window == result.training.accumulate == 3
    assert prove(result, folder, "uneven").passed


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_what_the_script_gives_is_noticed(uneven, bug: str) -> None:
    result, folder = uneven
    with changed(folder / "run.py", *BUGS[bug]):
        assert not prove(result, folder, "uneven").passed


def test_a_batch_that_depends_on_the_model_is_refused(tmp_path: Path) -> None:
    path = script(tmp_path, forward="w = 1 + model(x).mean().item()\n        loss = w * criterion(model(x), y)")
    training = trained(path)
    check_rerun(training)
    (tmp_path / INPUTS).write_text(training.feed().as_json())
    with pytest.raises(UserError, match="w depends on what the model computes") as error:
        check_fed(training, path, [], tmp_path)
    assert line_of(path, "loss.backward()") in str(error.value)


def test_an_update_that_computes_something_else_ends_the_batches(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        forward="x = torch.randn(8, 6); y = torch.arange(8) % 3\n"
        "        loss = criterion(model(x), y) if epoch < 2 or i < 3 else model(x).square().mean()",
    )
    training = trained(path)
    (tmp_path / INPUTS).write_text(training.feed().as_json())
    given = itertools.islice(ScriptBatches(path, [], tmp_path / INPUTS), 2 * 7 + 4)
    with pytest.raises(UserError, match="the calls of an update differ from update to update"):
        list(given)


def test_a_script_that_fails_ends_the_batches(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        forward="assert epoch < 2; x = torch.randn(8, 6); loss = criterion(model(x), torch.arange(8) % 3)",
        step="optimizer.param_groups[0]['lr'] = 0.1 / (1 + i); optimizer.step(); optimizer.zero_grad()",
    )
    training = trained(path)
    (tmp_path / INPUTS).write_text(training.feed().as_json())
    with pytest.raises(UserError, match=r"raised AssertionError .*train.py"):
        list(ScriptBatches(path, [], tmp_path / INPUTS))


def test_files_that_exist_are_kept(tmp_path: Path) -> None:
    old, log, new = tmp_path / "best.pt", tmp_path / "log.txt", tmp_path / "new.txt"
    torch.save({"a": 1}, old)
    log.write_text("first\n")
    before = old.read_bytes()
    (tmp_path / "kept").mkdir()
    with kept_files(tmp_path / "kept"):
        torch.save({"a": 2}, old)
        assert torch.load(old) == {"a": 2}
        with log.open("a") as file:
            file.write("second\n")
        assert log.read_text() == "first\nsecond\n"
        with open(old, "wb") as file:
            file.write(b"x")
        assert old.read_bytes() == b"x"
        torch.save({"a": 3}, tmp_path / "other.pt")
        new.write_text("new")
        time.sleep(0.02)  # the clock of files is coarse
        descriptor, made = tempfile.mkstemp(dir=tmp_path)
        os.close(descriptor)
        Path(made).write_text("made")
        os.replace(made, tmp_path / "moved.txt")
    assert old.read_bytes() == before
    assert log.read_text() == "first\n"
    assert new.read_text() == "new"
    assert (tmp_path / "moved.txt").read_text() == "made"
    assert not (tmp_path / "other.pt").exists()
