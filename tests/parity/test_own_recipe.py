"""`parity run FILE.py::NAME` of a recipe that defines its PyTorch side."""

import dataclasses
import json

from jaxtrain.optim import adamw
from jaxtrain.run import load_recipe
from parity.cases.recipe_case import recipe_case
from parity.cli import main
from parity.run import examine

FILE = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt


@dataclass(frozen=True, kw_only=True)
class Regression(jt.Recipe):
    batch_size: int = 8
    lr: float = 1e-2
    width: int = 4

    def task(self):
        x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)

        def init():
            width = self.width
            return {"hidden": jnp.zeros((3, width)), "b1": jnp.zeros(width), "out": jnp.zeros((width, 1))}

        def loss_fn(params, batch, rng):
            hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["b1"][None])
            return jt.Loss.of(((hidden @ params["out"])[:, 0] * FACTOR - batch["y"]) ** 2), {}

        return jt.Task(init=init, loss_fn=loss_fn, train={"x": x, "y": np.sin(x).sum(1)})

    def torch_model(self):
        import torch

        return torch.nn.Sequential(
            torch.nn.Linear(3, self.width), torch.nn.Tanh(), torch.nn.Linear(self.width, 1, bias=False)
        )

    def torch_loss(self, model, batch):
        error = model(batch["x"])[:, 0] - batch["y"]
        return (error**2).sum(), len(error)


@dataclass(frozen=True, kw_only=True)
class JaxOnly(jt.Recipe):
    def task(self):
        return Regression().task()
"""


def run(tmp_path, name, factor="1.0"):
    file = tmp_path / f"recipe_{factor.replace('.', '_')}.py"
    file.write_text(FILE.replace("FACTOR", factor))
    out = tmp_path / "verdict.json"
    status = main(["run", f"{file}::{name}", "--precision", "fp64", "--steps", "3", "--json", str(out)])
    return status, json.loads(out.read_text())["cases"] if out.exists() else None


def test_a_recipe_equals_its_pytorch_side(tmp_path):
    status, (case,) = run(tmp_path, "Regression")
    assert status == 0
    assert case["grad_rel_max"] < 1e-12
    assert 0 < case["loss_rel"] + case["param_rel_max"] < 1e-12


def test_an_optimizer_that_differs_is_diagnosed(tmp_path):
    file = tmp_path / "recipe_of_another_optimizer.py"
    file.write_text(FILE.replace("FACTOR", "1.0"))
    case = recipe_case(load_recipe(f"{file}::Regression")[1])
    other = dataclasses.replace(case.optimizer, jax=adamw(1e-2, b2=0.95, weight_decay=0.1, eps=1e-6))
    verdict = examine(dataclasses.replace(case, optimizer=other), "fp64", steps=3, locate=True).verdict
    assert not verdict.passed
    assert "optimizer" in " ".join(verdict.lines)


def test_a_wrong_factor_is_found(tmp_path):
    status, (case,) = run(tmp_path, "Regression", factor="1.001")
    assert status == 1
    assert not case["passed"]


def test_a_recipe_without_a_pytorch_side_is_refused(tmp_path, capsys):
    status, cases = run(tmp_path, "JaxOnly")
    assert (status, cases) == (2, None)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "JaxOnly has no PyTorch side: define the methods torch_model(self)" in error
