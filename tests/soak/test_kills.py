"""A run killed at random moments and restarted ends like one that was never killed."""

import json
import os
import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe
from jaxtrain.runner.checkpoint import Checkpoints, saved_steps
from jaxtrain.runner.optimizer import training_step
from jaxtrain.tasks import build

from .zygote import Life, Zygote, zygote

# Lines, evaluations and checkpoints fall together now and then only; a life is killed in the middle of all of them.
COMMAND = (
    "train digits-mlp --hidden 8 --batch-size 8 --accumulate 2 --precision fp16 --warmup-steps 4 "
    "--log-every 3 --eval-every 4 --save-every 2 --keep-last 2 --keep-every 10 --resume auto"
)
# Seconds from a life's first instruction to well into its steps.
LONG = 1.6


@pytest.mark.parametrize("kills", [3, pytest.param(int(os.environ.get("JAXTRAIN_KILLS", 200)), marks=pytest.mark.slow)])
def test_a_run_killed_at_random_ends_like_an_undisturbed_one(kills, tmp_path):
    rng = random.Random(kills)
    command = f"{COMMAND} --steps {20 + 2 * kills}"
    with zygote(tmp_path) as lives:
        assert lives.run(f"{command} --out whole")[0] == 0
        done, chains = dict.fromkeys(MOMENTS, 0), 0
        while sum(done.values()) < kills:
            chains += 1
            folder = tmp_path / f"killed-{chains}"
            killed_chain(lives, command, folder, kills - sum(done.values()), done, rng)
            assert_same_run(tmp_path / "whole", folder)
    print(f"{done}, {chains} chains")
    assert kills < 20 or min(done.values()) > kills / 10


def killed_chain(
    lives: Zygote, command: str, folder: Path, kills: int, done: dict[str, int], rng: random.Random
) -> None:
    """Start the run until it ends by itself, and kill it at most `kills` times before."""
    while True:
        life = lives.start(f"{command} --out {folder.name}")
        moment = rng.choice(list(MOMENTS)) if kills else None
        if moment:
            MOMENTS[moment](life, folder, rng)
            life.send(signal.SIGKILL)
        status = life.wait()
        assert status in (0, -signal.SIGKILL), life.text
        assert "Traceback" not in life.text
        assert "damaged" not in life.text
        if status == 0:
            return
        done[moment] += 1
        kills -= 1


def at_any_time(life: Life, folder: Path, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, LONG))


def in_a_save(life: Life, folder: Path, rng: random.Random) -> None:
    """Not in the first that comes: how many are made before decides how far the run gets."""
    for _ in range(rng.randint(1, 4)):
        life.until(lambda: not list(folder.glob("checkpoints/*.partial")))
        life.until(lambda: bool(list(folder.glob("checkpoints/*.partial"))))
    time.sleep(rng.uniform(0, 0.06))


def at_a_commit(life: Life, folder: Path, rng: random.Random) -> None:
    """As a checkpoint gets its name, and an old one goes."""
    life.until(lambda: "compiling the training step:" in life.text)
    for _ in range(rng.randint(1, 4)):
        before = max(saved_steps(folder / "checkpoints"), default=-1)
        life.until(lambda before=before: max(saved_steps(folder / "checkpoints"), default=-1) > before)
    time.sleep(rng.choice([0, rng.uniform(0, 0.01)]))


def in_a_restore(life: Life, folder: Path, rng: random.Random) -> None:
    life.until(lambda: "effective batch" in life.text)
    time.sleep(rng.uniform(0, 0.15))


def after_a_line(life: Life, folder: Path, rng: random.Random) -> None:
    metrics = folder / "metrics.jsonl"
    life.until(lambda: "compiling the training step:" in life.text)
    size = metrics.stat().st_size if metrics.exists() else 0
    life.until(lambda: metrics.exists() and metrics.stat().st_size > size + rng.randint(0, 1000))


MOMENTS = {
    "any time": at_any_time,
    "save": in_a_save,
    "commit": at_a_commit,
    "restore": in_a_restore,
    "line": after_a_line,
}


def assert_same_run(whole: Path, other: Path) -> None:
    assert sorted(saved_steps(whole / "checkpoints")) == sorted(saved_steps(other / "checkpoints"))
    one, two = state(whole), state(other)
    assert int(one.step) == read_recipe(RunFolder(whole))[1].steps
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
    assert untimed(whole) == untimed(other)
    assert scalars(whole) == scalars(other)


def state(folder: Path):
    recipe = read_recipe(RunFolder(folder))[1]
    task = build(recipe)
    like = training_step(recipe, task.loss_fn).init(task.params, model_state=task.model_state, seed=recipe.seed)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.restore(like)[0]


def untimed(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without what no two runs have in common."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("step_time_s", "examples_per_s", "input_wait_s", "peak_memory_bytes")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def scalars(folder: Path) -> dict[str, list]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in ("loss", "eval/loss", "grad_norm")}
