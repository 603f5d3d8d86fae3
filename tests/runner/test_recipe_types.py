"""mypy accepts a user's recipe as the documentation writes it, without `type: ignore`."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OWN = '''
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt


@dataclass(frozen=True, kw_only=True)
class Line(jt.Recipe):
    """A line."""

    width: int = 1
    schedule: str = "constant"

    def task(self) -> jt.Task:
        x = np.ones((8, self.width), np.float32)
        return jt.Task(
            init=lambda: {"w": jnp.zeros(self.width)},
            loss_fn=lambda params, batch, rng: (jt.Loss.of((batch["x"] @ params["w"] - batch["y"]) ** 2), {}),
            train={"x": x, "y": x.sum(1)},
        )

    def make_optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


@dataclass(frozen=True, kw_only=True)
class Named(jt.Recipe):
    """A recipe with the setting in place of the method."""

    optimizer: str = "lion"


state = jt.fit(Line(width=2, lr=0.1), quiet=True).state
Named(optimizer="sgd(momentum=0.9)", steps=3)
'''


def test_mypy_accepts_a_users_recipe_and_sees_a_wrong_setting(tmp_path, monkeypatch):
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)  # whose settings are strict, and whose cache holds the libraries
    file = tmp_path / "own.py"
    file.write_text(OWN)
    out, errors, status = mypy.run([str(file)])
    assert (status, errors) == (0, ""), out
    file.write_text(f"{OWN}Line(optimizer=0)\nLine(widht=2)\n")
    out, errors, status = mypy.run([str(file)])
    assert status == 1
    assert 'has incompatible type "int"' in out
    assert 'Unexpected keyword argument "widht"' in out
