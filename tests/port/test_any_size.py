"""A ported script whose batches have many lengths is one model, which computes what PyTorch does for every length."""

import dataclasses
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.port import model as written_model
from jaxtrain.port.any_size import Axes, common_source
from jaxtrain.port.batch_shapes import load_shapes
from jaxtrain.port.ported import Ported, program_module
from parity.case import Case
from parity.ported import ported_case
from parity.run import check

from .loops import script, written_port

HEAD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8); self.head = nn.Linear(8, 3)
        {init}

    def forward(self, x, mask):
        h = self.embed(x)
        {forward}
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

model = Net()
"""
LENGTHS = {
    "positions": (
        "self.positions = nn.Parameter(0.1 * torch.randn(1, 40, 8))",
        "h = h + self.positions[:, :x.size(1)]",
    ),
    "attention": (
        "self.q = nn.Linear(8, 8); self.k = nn.Linear(8, 8)",
        "b, t, c = h.shape\n"
        "        q, k = (part(h).view(b, t, 2, c // 2).transpose(1, 2) for part in (self.q, self.k))\n"
        "        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(torch.triu(torch.ones(t, t), 1).bool(), -1e9)\n"
        "        h = (scores.softmax(-1) @ h.view(b, t, 2, c // 2).transpose(1, 2)).transpose(1, 2).reshape(b, t, c)",
    ),
    "bins": (
        "self.mix = nn.Linear(8, 8)",
        "h = self.mix(h.reshape(x.size(0) * x.size(1), 8)).view(*x.shape, 8) / x.size(1)",
    ),
    "kernel": ("self.conv = nn.Conv1d(8, 8, 3, padding=1)", "h = self.conv(h.transpose(1, 2)).tanh().transpose(1, 2)"),
    "recurrent": ("self.rnn = nn.GRU(8, 8, batch_first=True)", "h = self.rnn(h)[0]"),
    "reversed": (
        "self.far = nn.Embedding(80, 8)",
        "t = torch.arange(x.size(1)); h = h + self.far(t[None, :] - t[:, None] + x.size(1) - 1).mean(1)",
    ),
}


def of_lengths(folder: Path, init: str, forward: str) -> Path:
    """Write a script whose batches have the lengths 5 to 9, and 4 or 3 rows."""
    return script(
        folder,
        model=HEAD.format(init=init, forward=forward),
        forward="x = torch.randint(20, (4 - i % 2, 5 + i % 5)); y = torch.arange(4 - i % 2) % 3\n"
        "        loss = criterion(model(x, (x > 3).float() + 0.1), y)",
    )


def of_sizes(result: Ported, folder: Path, rows: int, length: int) -> Case:
    """Return the case of a batch that no update had."""
    backward, inputs = result.training.programs[0]
    batch = inputs.batch_of(backward)
    places = {"a": [(name, 0) for name in batch], "b": [(name, 1) for name, x in batch.items() if x.ndim > 1]}
    sized = Axes(places, {}).resized(batch, {"a": rows, "b": length})
    window = {name: x[None].numpy() for name, x in sized.items()}
    case = ported_case(result, folder, "sizes")
    return dataclasses.replace(case, windows=[window], module=program_module(result.training, 0))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", LENGTHS)
def test_batches_of_every_length_are_one_model(tmp_path: Path, name: str) -> None:
    result = written_port(of_lengths(tmp_path, *LENGTHS[name]), 12, is_fed=False)
    ((known, file),) = load_shapes(tmp_path)
    assert file == "model.py"
    ((low, high),) = {known.ranges[letter] for letter in known.sizes["x"] if known.ranges[letter][1] > 9}
    assert (low <= 3, high) == (True, 19)
    for rows, length in ((2, 3), (7, 11), (6, 19)):
        verdict = check(of_sizes(result, tmp_path, rows, length), steps=3)
        assert verdict.passed, verdict.faults


def test_what_no_source_has_in_common_is_for_the_recorded_lengths_alone(tmp_path: Path) -> None:
    unrolled = ("self.step = nn.Linear(8, 8)", "h = torch.stack([self.step(h[:, t]) for t in range(x.size(1))], 1)")
    result = written_port(of_lengths(tmp_path, *unrolled), 12, is_fed=False)
    assert result.any_size is None
    assert len(load_shapes(tmp_path)) == 7
    backward, inputs = result.training.programs[0]
    batch = {name: x.numpy() for name, x in inputs.batch_of(backward).items()}
    batch["x"] = batch["x"][:, :4]
    with pytest.raises(UserError, match=r"a batch has the shapes .*x \[4, 4\]"):
        written_model(tmp_path)(result.model.params, batch)


def test_a_number_is_a_size_of_an_argument_in_every_source() -> None:
    text = 'def f(x, y):\n    """F: x [{t}, 4], y [{n}] -> []"""\n    return x.reshape({number}) + 4\n'

    def common(number: str) -> str | None:
        sizes = ((3, 7), (5, 8), (9, 2), (6, 6))
        return common_source([text.format(t=t, n=n, number=eval(number, {"t": t, "n": n})) for t, n in sizes])

    found = {number: common(number) for number in ("t", "n", "t + 2", "t - 1", "t * n", "4 * t", "t * t", "t // 2")}
    lines = {
        number: None if one is None else one.splitlines()[-1].partition("reshape")[2] for number, one in found.items()
    }
    assert lines == {
        "t": "(x.shape[0]) + 4",
        "n": "(y.shape[0]) + 4",
        "t + 2": "((x.shape[0] + 2)) + 4",
        "t - 1": "((x.shape[0] - 1)) + 4",
        "t * n": "((x.shape[0] * y.shape[0])) + 4",
        "4 * t": "((4 * x.shape[0])) + 4",
        "t * t": "((x.shape[0] * x.shape[0])) + 4",
        "t // 2": None,
    }
    reassigned = [f'def f(x):\n    """F: x [{t}] -> []"""\n    x = x[1:]\n    return {t}\n' for t in (3, 5)]
    assert common_source(reassigned) is None
    assert common_source(["x = 3\n", "x = 5\n"]) is None
