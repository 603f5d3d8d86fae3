"""Scripts that clamp parameters by hand."""

import itertools
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.understand import understood
from parity.ported import prove

from .duels import CLAMPS, clamped, duel
from .loops import changed, line_of, script, written_port


@pytest.mark.parametrize(("number", "clamp"), [*zip(range(12), itertools.cycle(CLAMPS), strict=False)])
def test_a_generated_script_is_understood_to_the_bit(tmp_path: Path, number: int, clamp: str) -> None:
    training = understood(record(clamped(tmp_path, number, clamp), [], 14))
    check_rerun(training)
    generator, discriminator = training.turns
    assert not generator.clamps
    names = {id(p): name for name, p in training.modules["D"].named_parameters()}
    bounds = {names[key]: clamp.bounds for key, clamp in discriminator.clamps.items()}
    if clamp == "weights alone":
        assert bounds == {"0.weight": (-0.2, None), "3.weight": (-0.2, 0.2)}
    else:
        assert bounds == dict.fromkeys(names.values(), (-0.2, 0.2))


@pytest.fixture(scope="module", params=["data", "weights alone"])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    folder = tmp_path_factory.mktemp("clamped")
    return written_port(clamped(folder, 2, request.param), 12), folder


def test_the_written_files_are_the_script(written) -> None:
    result, folder = written
    proof = prove(result, folder, "clamped")
    assert proof.passed, proof.lines
    with changed(folder / "run.py", "minimum=-0.2", "minimum=-0.201"):
        assert not prove(result, folder, "clamped").passed


def test_one_optimizer_may_clamp_a_layer(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        step="optimizer.step(); optimizer.zero_grad(); model[2].weight.data.clamp_(min=0)",
        optimizer="optimizer = torch.optim.SGD([{'params': model[0].parameters()}, {'params': model[2].parameters(),"
        " 'lr': 0.2}], lr=0.1, momentum=0.9)",
    )
    result = written_port(path, 8)
    assert prove(result, tmp_path, "layer").passed
    with changed(tmp_path / "run.py", "minimum=0", "minimum=-0.01"):
        assert not prove(result, tmp_path, "layer").passed


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("if i % 2: model[0].weight.data.clamp_(-0.2, 0.2)", "parameters are clamped after some updates alone"),
        ("model[0].weight.data.clamp_(-0.2 / (1 + i), 0.2)", "parameters are clamped after some updates alone"),
        ("model[0].weight.data[0].clamp_(-0.2, 0.2)", "model.0.weight is trained, and changed by hand"),
        ("model[0].weight.data.mul_(0.99).clamp_(-0.2, 0.2)", "model.0.weight is trained, and changed by hand"),
        ("model[0].weight.data.clamp_(torch.tensor(-0.2), None)", "what follows an update reads more"),
        ("model[0].weight.data.copy_(model[2].weight.data.sum().clamp(-1, 1))", "is trained, and changed by hand"),
    ],
)
def test_other_changes_are_refused_by_line(tmp_path: Path, step: str, problem: str) -> None:
    path = script(tmp_path, step=f"optimizer.step(); optimizer.zero_grad()\n        {step}")
    with pytest.raises(UserError, match=problem) as error:
        check_rerun(understood(record(path, [], 8)))
    assert line_of(path, step) in str(error.value)


def test_a_clamp_before_an_update_is_refused(tmp_path: Path) -> None:
    """The generator's update between reads parameters that are not clamped."""
    path = duel(tmp_path, 0)
    clamp = "[p.data.clamp_(-0.2, 0.2) for p in D.parameters()]; optimizer_d.zero_grad()"
    path.write_text(path.read_text().replace("optimizer_d.zero_grad()", clamp))
    with pytest.raises(UserError, match=r"clamped (before an update|after some updates alone)") as error:
        understood(record(path, [], 14))
    assert line_of(path, "clamp_") in str(error.value)
