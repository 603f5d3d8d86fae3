"""Scripts of several optimizers that take turns."""

from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.port.calls import Value
from jaxtrain.port.recipe_source import INPUTS
from jaxtrain.port.rerun import check_rerun
from jaxtrain.port.script import record
from jaxtrain.port.turns import _memory
from jaxtrain.port.understand import understood
from parity.ported import prove

from .duels import duel
from .loops import changed, written_port


@pytest.mark.parametrize("number", range(24))
def test_a_generated_script_is_understood_to_the_bit(tmp_path: Path, number: int) -> None:
    training = understood(record(duel(tmp_path, number), [], 14))
    check_rerun(training)
    assert len(training.turns) == 2
    assert [type(turn.optimizer).__name__ for turn in training.turns][1] == "Adam"
    text = (tmp_path / "train.py").read_text()
    for turn, model in zip(training.turns, "GD", strict=True):
        assert (turn.clip is not None) == (f"({model}.parameters(), 0.0" in text)
        assert turn.cut.rates == (("rate",) if "scheduler" in text else ())
    names = [{root.name for root in turn.cut.roots if root.kind == "input"} for turn in training.turns]
    assert names[0] == {"noise"} | ({"target"} if "target" in names[0] else set())
    assert {"noise", "real"} <= names[1]


def test_memory_that_was_freed_between_updates_is_another_one() -> None:
    """Tensors of one place share it within an update; those after the update before have it only if one was there."""
    a, b, c, d, e = map(Value, range(5))
    found = _memory({a: 7, c: 7, d: 1, e: 1}, {a: 3, b: 9})
    assert found == {c: 3, d: found[e], e: found[e]}
    assert found[e] not in (3, 9)
    assert len(set(_memory({a: 5, b: 6}, {}).values())) == 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("duel")
    path = duel(folder, 35)
    text = path.read_text()
    assert all(part in text for part in ("clip_grad_norm_", "clip_grad_value_", "scheduler"))
    return written_port(path, 16), folder


def test_the_written_files_are_the_script(written) -> None:
    result, folder = written
    assert (folder / INPUTS).exists()
    proof = prove(result, folder, "duel")
    assert proof.passed, proof.lines


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("turn=0", "turn=1"),
        ("max_norm=0.05", "max_norm=0.051"),
        ("max_value=0.01", "max_norm=0.01"),
        ('batch.pop("rate")', '1.01 * batch.pop("rate")'),
    ],
)
def test_a_bug_in_the_written_turns_is_noticed(written, old: str, new: str) -> None:
    result, folder = written
    with changed(folder / "run.py", old, new):
        assert not prove(result, folder, "duel").passed


def test_a_bug_in_the_model_of_a_turn_is_located(written) -> None:
    result, folder = written
    with changed(folder / "model.py", "jnp.tanh(", "1.01 * jnp.tanh("):
        lines = prove(result, folder, "duel").lines
    (line,) = [line for line in lines if "in JAX" in line]
    assert "model.py:" in line
    assert "1.01 * jnp.tanh(" in line


def test_random_numbers_that_two_updates_share_are_refused(tmp_path: Path) -> None:
    path = duel(tmp_path, 0)
    text = path.read_text()
    assert "D(fake)" in text
    path.write_text(text.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.1)", 1))
    with pytest.raises(UserError, match="random numbers that two updates share"):
        understood(record(path, [], 14))


SHARED = """
import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
D, Q = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(6, 4)
data = torch.randn(28, 6)
optimizer_g = torch.optim.Adam(G.parameters(), lr=1e-2)
optimizer_d = torch.optim.Adam(D.parameters(), lr=1e-2)
optimizer_q = torch.optim.SGD([*G.parameters(), *Q.parameters()], lr=1e-2, momentum=0.9)
for epoch in range(100):
    for i in range(0, 28, 7):
        real, noise = data[i : i + 7], torch.randn(7, 4)
        fake = G(noise)
        optimizer_g.zero_grad(); D(fake).mean().neg().backward(); optimizer_g.step()
        optimizer_d.zero_grad(); (D(fake.detach()).mean() - D(real).mean()).backward(); optimizer_d.step()
        optimizer_q.zero_grad(); (Q(G(noise)) - noise).square().mean().backward(); optimizer_q.step()
"""


def test_a_parameter_may_have_several_optimizers(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SHARED)
    result = written_port(path, 15, is_fed=False)
    proof = prove(result, tmp_path, "shared")
    assert proof.passed, proof.lines
    with changed(tmp_path / "run.py", "momentum=0.9", "momentum=0.91"):
        assert not prove(result, tmp_path, "shared").passed


NOISY = """
import torch
from torch import nn

torch.manual_seed(0)
nets = [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
optimizers = [torch.optim.Adam(net.parameters(), lr=0.03) for net in nets]
x, y = torch.randn(28, 6), 100 * torch.randn(28, 1)
for epoch in range(100):
    for i in range(0, 28, 7):
        for net, optimizer in zip(nets, optimizers):
            loss = (net(x[i : i + 7]) - y[i : i + 7]).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_biases_before_a_batch_norm_may_differ_by_their_noise(tmp_path: Path) -> None:
    """Adam makes visible steps of a gradient that is zero in mathematics, also in a turn that is not the first."""
    path = tmp_path / "train.py"
    path.write_text(NOISY)
    result = written_port(path, 12, is_fed=False)
    proof = prove(result, tmp_path, "noise")
    assert proof.passed, proof.lines
    with changed(tmp_path / "model.py", "jnp.tanh(", "1.001 * jnp.tanh("):
        assert not prove(result, tmp_path, "noise").passed
