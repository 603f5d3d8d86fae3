"""Runs of an imported module: `jaxtrain train`, to and from PyTorch's checkpoints."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import parity.cli
from jaxtrain.cli import main
from jaxtrain.data import digits
from jaxtrain.data.loader import Loader
from jaxtrain.user_file import import_file

FILE = """
from dataclasses import dataclass

import torch
from torch import nn

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.data import digits


class Classifier(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(rate))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.also = nn.Linear(8, 10), nn.Linear(8, 10)
        self.also.weight = self.head.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, image):
        hidden = self.body(image.flatten(1)) * self.scale + self.fixed
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden) + self.also(hidden)


@dataclass(frozen=True, kw_only=True)
class Digits(jt.Recipe):
    rate: float = 0.0
    batch_size: int = 16
    steps: int = 6

    def task(self):
        torch.manual_seed(self.seed)
        model = jt.from_torch(Classifier(self.rate), {"image": torch.rand(16, 8, 8)})

        def loss(logits, batch):
            return jt.Loss.of(losses.cross_entropy(logits, batch["label"]), batch.get("weight"))

        return model.task(loss, train=digits()[0])
"""
QUIET = "--quiet --save-every 1 --keep-last 9"
RTOL = 1e-4
"""Of parameters after updates in float32 on both sides, as for the built-in recipes in `tests/cli`."""


@pytest.fixture
def classifier(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Path("classifier.py").write_text(FILE)
    yield import_file(Path("classifier.py"))
    torch.set_num_threads(threads)


def run(command: str) -> None:
    assert main(command.split()) == 0, command


def parts(classifier):
    module = classifier.Classifier()
    # A smaller eps makes steps of the rounding noise (7e-8) that is the gradient of the bias before BatchNorm.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
    return module, optimizer, LinearLR(optimizer, 0.5, total_iters=10)


def train(module, optimizer, scheduler, batches) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(batch["image"])), torch.from_numpy(batch["label"]).long()
        )
        loss.backward()
        optimizer.step()
        scheduler.step()


def state_dicts(*of) -> dict:
    return dict(zip(("model", "optimizer", "scheduler"), (part.state_dict() for part in of), strict=True))


def test_a_run_goes_from_pytorch_through_jax_and_back(classifier) -> None:
    loader = Loader(digits()[0], 16, 0)
    batches = [next(loader) for _ in range(8)]
    torch.manual_seed(1)
    whole = parts(classifier)
    train(*whole, batches[:3])
    torch.save({**state_dicts(*whole), "step": 3}, "three.pt")
    run("import-torch three.pt --model classifier.py::Digits --out run")
    run(f"train --resume --out run {QUIET}")
    run("export run --out six.pt")
    train(*whole, batches[3:6])
    again = parts(classifier)
    saved = torch.load("six.pt", weights_only=True)
    again[0].load_state_dict(saved["model"], strict=True)
    again[1].load_state_dict(saved["optimizer"])
    again[2].load_state_dict(saved["scheduler"])
    assert again[2].state_dict() == whole[2].state_dict()
    assert torch.equal(again[0].fixed, whole[0].fixed)
    assert again[0].body[1].num_batches_tracked == 6
    for more in ([], batches[6:]):
        train(*again, more)
        train(*whole, more)
        for (name, ours), theirs in zip(again[0].state_dict().items(), whole[0].state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=RTOL / 10, msg=name)


def test_a_resumed_run_has_the_same_bits_and_goes_on_in_pytorch(classifier) -> None:
    run(f"train classifier.py::Digits --rate 0.1 --out run {QUIET}")
    shutil.copytree("run", "again")
    for step in ("5", "6"):
        shutil.rmtree(f"again/checkpoints/{step}")
    run(f"train --resume --out again {QUIET}")
    for name in ("run", "again"):
        run(f"export {name} --out {name}.pt")
    ours, theirs = (torch.load(f"{name}.pt", weights_only=True) for name in ("again", "run"))
    for name, x in theirs["model"].items():
        np.testing.assert_array_equal(ours["model"][name], x)
    module, *_ = parts(classifier)
    module.load_state_dict(theirs["model"], strict=True)
    groups = [[p for p in module.parameters() if (p.ndim < 2) == is_exempt] for is_exempt in (False, True)]
    optimizer = torch.optim.AdamW([{"params": params} for params in groups])
    optimizer.load_state_dict(theirs["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for param, slots in optimizer.state.items():
        assert slots["exp_avg"].shape == param.shape
    assert len(optimizer.state) == len([p for p in module.parameters() if p.requires_grad])


def test_the_commands_of_the_tutorial_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "import-tutorial.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.S)
    Path("classifier.py").write_text(next(block for kind, block in blocks if kind == "python"))
    commands = [
        line.removeprefix("$ ").split() for kind, block in blocks if kind == "console" for line in block.splitlines()
    ]
    assert [words[:2] for words in commands] == [["parity", "run"], ["jaxtrain", "train"], ["jaxtrain", "export"]]
    for program, *arguments in commands:
        assert {"jaxtrain": main, "parity": parity.cli.main}[program](arguments) == 0, arguments
    assert "factory fp64 held" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "classifier", import_file(Path("classifier.py")))
    exec(next(block for kind, block in blocks if kind == "py"), {})
    assert capsys.readouterr().out == next(block for kind, block in blocks if kind == "text")
