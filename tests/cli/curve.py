"""A user's recipe, and a run of it."""

from pathlib import Path

from jaxtrain.cli import main

CURVE = '''"""A curve through noisy points."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.interop import LINEAR, NameTable, TorchParam


@dataclass(frozen=True, kw_only=True)
class Curve(jt.Recipe):
    """A curve through noisy points."""

    width: int = 8
    """Units of the hidden layer."""
    offset: int = 0
    """Added to every target."""
    steps: int = 12
    batch_size: int = 8
    lr: float = 1e-2
    log_every: int = 4
    eval_every: int = 4
    save_every: int = 4

    def task(self) -> jt.Task:
        x = np.random.default_rng(self.seed).normal(size=(40, 3))
        y = np.sin(x.sum(1)) + self.offset

        def init():
            keys = jax.random.split(jax.random.key(self.seed))
            hidden = jax.random.normal(keys[0], (3, self.width))
            return {"hidden": hidden, "out": jax.random.normal(keys[1], self.width)}

        def predict(params, batch, model_state):
            return jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]

        def loss_fn(params, batch, rng):
            error = predict(params, batch, None) - batch["y"]
            return jt.Loss.of(error**2, batch.get("weight")), {}

        return jt.Task(
            init=init,
            loss_fn=loss_fn,
            train={"x": x[:32], "y": y[:32]},
            validation={"x": x[32:], "y": y[32:]},
            predict=predict,
            sample=lambda state, seed: f"seed {seed}: {state.params['out'].shape}",
            names=NameTable({"hidden": TorchParam("hidden.weight", LINEAR), "out": TorchParam("out")}),
        )
'''


def run(command: str) -> int:
    """Run a command of `jaxtrain` and return its exit status."""
    return main(command.split())


def train_curve(folder: Path, source: str, settings: str = "") -> Path:
    """Write a recipe to curve.py in a folder, train it there, and return the folder."""
    (folder / "curve.py").write_text(source)
    assert run(f"train {folder}/curve.py::Curve --out {folder}/run --quiet {settings}") == 0
    return folder
