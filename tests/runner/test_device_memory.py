"""A run holds one copy of its state on the devices: no initial values, and no state that a restore replaced."""

import gc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.runner import Checkpoints

SIZE = 2**20


@dataclass(frozen=True, kw_only=True)
class Large(jt.Recipe):
    """A vector of 4 MiB, and Adam's moments."""

    steps: int = 2
    batch_size: int = 4

    def task(self):
        def loss_fn(params, batch, rng):
            return jt.Loss.of((params["w"].mean() * batch["x"] - 1) ** 2), {}

        return jt.Task(init=lambda: {"w": jnp.ones(SIZE)}, loss_fn=loss_fn, train={"x": np.ones(8, np.float32)})


STATE = 3 * 4 * SIZE


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", None])
def test_a_run_holds_its_state_once(mesh, tmp_path, monkeypatch):
    gc.collect()
    others = live_bytes()
    seen = {}

    def on_step(step, metrics, state):
        jax.block_until_ready(state)
        seen[step] = live_bytes() - others

    save, restore = Checkpoints.save, Checkpoints.restore

    def saved(self, *args):
        save(self, *args)
        self.wait()  # on a CPU a save holds a copy of the state

    def measured(self, *args, **kwargs):
        seen["before the restore"] = live_bytes() - others
        found = restore(self, *args, **kwargs)
        seen["after the restore"] = live_bytes() - others
        return found

    monkeypatch.setattr(Checkpoints, "save", saved)
    monkeypatch.setattr(Checkpoints, "restore", measured)
    jt.fit(Large(mesh=mesh), tmp_path / "run", quiet=True, on_step=on_step)
    assert all(STATE <= seen[step] <= 1.05 * STATE for step in (1, 2)), seen
    jt.fit(Large(mesh=mesh, steps=3), tmp_path / "run", resume=True, quiet=True, on_step=on_step)
    assert seen["before the restore"] <= 0.05 * STATE, seen
    assert all(STATE <= seen[at] <= 1.05 * STATE for at in ("after the restore", 3)), seen
