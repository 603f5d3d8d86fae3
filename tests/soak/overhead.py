"""Measure how long a save blocks the training loop: `python -m tests.soak.overhead [MiB] [FOLDER]`.

The state is that of AdamW for one large model, and the step donates it. The loop waits for the call of `save` and, on a
CPU, for a copy in the next step, which may not overwrite buffers that the save still reads. The copy takes the time by
which that step exceeds the other steps during the same save, which share the cores with the writer.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxtrain as jt
from jaxtrain.runner.checkpoint import Checkpoints

SAVES, BETWEEN = 7, 3


def main(mebibytes: int, folder: Path) -> None:
    # Parameters and two moments, in layers of 4 MiB; batches large enough to keep the device busy.
    layers = max(1, mebibytes // 12)
    params = {f"layer_{i}": jax.random.normal(jax.random.key(i), (1024, 1024)) / 32 for i in range(layers)}

    def loss_fn(params: dict, batch: dict, rng: jax.Array) -> tuple[jt.Loss, dict]:
        x = batch["x"]
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jt.Loss((x**2).sum(), weight=x.shape[0]), {}

    step = jt.train_step(loss_fn, optax.adamw(1e-3))
    state = step.init(params, seed=0)
    del params
    batch = {"x": jnp.ones((64, 1024))}

    def timed_step() -> float:
        nonlocal state
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        return time.perf_counter() - begin

    for _ in range(3):
        timed_step()
    quiet = statistics.median(timed_step() for _ in range(9))
    rows = []
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for _ in range(SAVES):
            begin = time.perf_counter()
            checkpoints.save(state, {})
            call = time.perf_counter() - begin
            during = []
            while not checkpoints.idle:
                during.append(timed_step())
            whole = time.perf_counter() - begin
            others = statistics.median(during[1:])
            blocked = call + max(during[0] - others, 0)
            rows.append([1e3 * call, 1e3 * during[0], 1e3 * others, 1e3 * whole, 100 * blocked / whole])
            checkpoints.wait()
            for _ in range(BETWEEN):
                timed_step()
    size = sum(p.stat().st_size for p in max((folder / "checkpoints").iterdir()).rglob("*") if p.is_file())
    print(f"{size / 2**20:.0f} MiB on {jax.devices()[0].device_kind}, a step without saves {quiet * 1e3:.0f} ms")
    names = ("call of save, ms", "next step, ms", "other steps, ms", "whole save, ms", "loop blocked, %")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name:16} {' '.join(f'{v:7.1f}' for v in values)}   median {statistics.median(values):.1f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 600, Path(sys.argv[2] if len(sys.argv) > 2 else scratch))
