"""Scripts with a teacher, whose weights follow those of a student after each update."""

from pathlib import Path

import pytest

from jaxtrain.port.inputs import AFTER_UPDATE
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from parity.ported import prove

from .loops import changed, written_port
from .teachers import FOLLOWS, teacher


@pytest.mark.parametrize("number", range(28))
def test_a_generated_script_is_understood_to_the_bit(tmp_path: Path, number: int) -> None:
    path = teacher(tmp_path, number)
    text = path.read_text()
    training = understood(record(path, [], 8))
    check_rerun(training)
    assert training.cut is not None
    assert training.cut.lead is not None
    assert {name for name in training.cut.lead.changes if "running" not in name and "tracked" not in name} == {
        f"teacher.{name}" for name, _ in training.modules["teacher"].named_parameters()
    }
    assert bool(training.cut.numbers) == ("m = 1" in text)
    window = 2 if "loss / 2" in text else 1
    flags = [bool(micro[AFTER_UPDATE]) for _, micros in training.windows() for micro in micros]
    assert flags == [i > 0 and i % window == 0 for i in range(len(flags))]
    assert bool(training.evaluated) == ("teacher.eval()" in text)


@pytest.fixture(scope="module", params=range(len(FOLLOWS)))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("teacher")
    path = teacher(folder, request.param)
    text = path.read_text().replace("    pass\n", "    p.data.mul_(0.5)\n")
    # A weight that is given as 0 where it is not read would hide the bug.
    path.write_text(text.replace("m = 1 - 0.5 / (1 + step)", "m = 0.9") if "lerp_" in text else text)
    return written_port(path, 6), folder


def test_the_written_files_are_the_script(written) -> None:
    result, folder = written
    proof = prove(result, folder, "teacher")
    assert proof.passed, proof.lines
    with changed(folder / "model.py", "jnp.where(is_after_update, ", "jnp.where(True, "):
        assert not prove(result, folder, "teacher").passed
