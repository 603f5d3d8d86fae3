"""A run that is killed at random times and restarted ends like an uninterrupted run."""

import json
import os
import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtrain.models import GPT2, GPT2Config, functional, save_pretrained
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from jaxtrain.runner.checkpoint import saved_steps
from tests.data.finetuning.templates import byte_level, write_folder

from .fork_server import Child, ForkServer

# Logging, evaluations and saves seldom all fall on one step; kills hit each of them.
COMMAND = (
    "train digits-mlp --hidden 8 --batch-size 8 --accumulate 2 --precision fp16 --warmup-steps 4 "
    "--log-every 3 --eval-every 4 --save-every 2 --keep-last 2 --keep-every 10 --resume auto"
)
FINETUNE = (
    "train finetune --model pretrained --data chats.jsonl --seq-len 60 --quantize nf4 --targets .*attn.* --rank 2 "
    "--neftune 5 --answers None --batch-size 2 --log-every 3 --eval-every 8 --save-every 2 --resume auto --steps 24"
)
# Seconds from the start of a child until it has trained for some steps.
LONG = 1.6


MANY = int(os.environ.get("JAXTRAIN_KILLS", 200))


@pytest.mark.parametrize("kills", [3, 6, pytest.param(MANY, marks=pytest.mark.nightly)])
def test_a_run_killed_at_random_times_ends_like_an_uninterrupted_one(kills, server):
    rng = random.Random(kills)
    command = f"{COMMAND} --steps {20 + 2 * kills}"
    whole = server.folder / f"whole-{kills}"
    assert server.run(f"{command} --out {whole.name}")[0] == 0
    done, chains = dict.fromkeys(MOMENTS, 0), 0
    while sum(done.values()) < kills:
        chains += 1
        folder = server.folder / f"killed-{kills}-{chains}"
        killed_chain(server, command, folder, kills - sum(done.values()), done, rng)
        assert_same_run(whole, folder)
    print(f"{done}, {chains} chains")
    assert min(done.values()) >= kills // len(MOMENTS)


def test_a_killed_fine_tuning_resumes_from_adapters_alone(server):
    write_pretrained(server.folder)
    whole, killed = server.folder / "whole-adapters", server.folder / "killed-adapters"
    status, text = server.run(f"{FINETUNE} --out {whole.name}")
    assert status == 0, text
    done = dict.fromkeys(("save", "commit", "restore"), 0)
    killed_chain(server, FINETUNE, killed, len(done), done, random.Random(0))
    assert set(done.values()) == {1}
    assert_same_run(whole, killed)
    base = (server.folder / "pretrained" / "model.safetensors").stat().st_size
    arrays = [*killed.glob("checkpoints/*/state/ocdbt.process_0/d/*")]
    assert 0 < sum(file.stat().st_size for file in arrays) < base / 8


def write_pretrained(folder: Path) -> None:
    """Write a model in bfloat16 with a tokenizer and conversations: folder/pretrained and folder/chats.jsonl."""
    made = byte_level()
    write_folder(folder / "pretrained", "chatml", made)
    config = GPT2Config(vocab_size=made.get_vocab_size(), n_positions=64, n_embd=256, n_layer=1, n_head=2)
    _, params = functional(GPT2(config, rngs=nnx.Rngs(0)))
    save_pretrained(folder / "pretrained", jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), params), config)
    chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "42"}] for i in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def killed_chain(
    server: ForkServer, command: str, folder: Path, kills: int, done: dict[str, int], rng: random.Random
) -> None:
    """Restart the run until it finishes, and kill it at most `kills` times before."""
    while True:
        child = server.start(f"{command} --out {folder.name}")
        moment = least_tried(done, rng) if kills else None
        if moment:
            MOMENTS[moment](child, folder, rng)
            child.send(signal.SIGKILL)
        status = child.wait()
        assert status in (0, -signal.SIGKILL), child.text
        assert "Traceback" not in child.text
        assert "damaged" not in child.text
        if status == 0:
            return
        done[moment] += 1
        kills -= 1


def least_tried(done: dict[str, int], rng: random.Random) -> str:
    """Draw a moment among those with the fewest kills so far: every moment gets its share."""
    fewest = min(done.values())
    return rng.choice([moment for moment, count in done.items() if count == fewest])


def at_any_time(child: Child, folder: Path, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, LONG))


def in_a_save(child: Child, folder: Path, rng: random.Random) -> None:
    """Skip a random number of saves, which determines how far the run gets."""
    for _ in range(rng.randint(1, 4)):
        child.until(lambda: not list(folder.glob("checkpoints/*.partial")))
        child.until(lambda: bool(list(folder.glob("checkpoints/*.partial"))))
    time.sleep(rng.uniform(0, 0.06))


def at_a_commit(child: Child, folder: Path, rng: random.Random) -> None:
    """Kill the run while a checkpoint is renamed and an old one is deleted."""
    child.until(lambda: "compiling the training step:" in child.text)
    for _ in range(rng.randint(1, 4)):
        before = max(saved_steps(folder / "checkpoints"), default=-1)
        child.until(lambda before=before: max(saved_steps(folder / "checkpoints"), default=-1) > before)
    time.sleep(rng.choice([0, rng.uniform(0, 0.01)]))


def in_a_restore(child: Child, folder: Path, rng: random.Random) -> None:
    child.until(lambda: "effective batch" in child.text)
    time.sleep(rng.uniform(0, 0.15))


def after_a_line(child: Child, folder: Path, rng: random.Random) -> None:
    metrics = folder / "metrics.jsonl"
    child.until(lambda: "compiling the training step:" in child.text)
    size = metrics.stat().st_size if metrics.exists() else 0
    child.until(lambda: metrics.exists() and metrics.stat().st_size > size + rng.randint(0, 1000))


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
    return restore_state(folder / "checkpoints", recipe, recipe.task())


def untimed(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the values that differ between any two runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("step_time_s", "examples_per_s", "tokens_per_s", "input_wait_s", "peak_memory_bytes")
    timed += ("straggler", "straggler_host_s", "others_host_s")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def scalars(folder: Path) -> dict[str, list]:
    """Return the scalars in the TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in ("loss", "eval/loss", "grad_norm")}
