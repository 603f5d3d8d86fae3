"""Part 6: whether training that another process resumes ends with the same bits.

Each process compiles anew, without JAX's cache of programs. Three settings: `deterministic` is the step's own option,
without autotuning; `frozen` chooses kernels by timing them once, and reads these choices when it resumes; `default`
chooses them anew, and need not end with the same bits.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.lines import emit, note

STEPS = 6
SETTINGS = ("deterministic", "frozen", "default")
SIZES = {
    False: {"depth": 2, "rows": 4, "length": 512},
    True: {"vocab_size": 64, "width": 32, "depth": 2, "heads": 2, "rows": 4, "length": 16},
}


def train(setting: str, folder: Path, *, resumed: bool, sizes: dict[str, int]) -> str:
    """Train from the start and save the state of half the steps, or resume from there; return a digest of the last."""
    import jax
    import numpy as np

    import jaxtrain
    from benchmarks.workloads import WORKLOADS
    from parity.sides import jax_side, torch_side

    case = WORKLOADS["gpt2-124m"].case(sizes)
    step = jaxtrain.train_step(
        case.loss_fn,
        case.optimizer.jax,
        precision="bf16",
        accumulate=2,
        clip_norm=case.clip_norm,
        deterministic=setting == "deterministic",
    )
    params, _ = jax_side.from_torch(case, torch_side.initial_weights(case, seed=0))
    state, path = step.init(params), folder / f"{setting}.npz"

    def leaves(state: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(state._replace(rng=jax.random.key_data(state.rng)))]

    if resumed:
        saved = np.load(path)
        like = state._replace(rng=jax.random.key_data(state.rng))
        state = jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(saved[name]) for name in saved.files])
        state = state._replace(rng=jax.random.wrap_key_data(state.rng))
    for i in range(STEPS // 2 if resumed else 0, STEPS):
        if i == STEPS // 2 and not resumed:
            np.savez(path, *leaves(state))
        state, _ = step(state, jax_side.arrays(case.batch(i, case.rows), "bf16"))
    digest = hashlib.sha256()
    for x in leaves(state):
        digest.update(x.tobytes())
    return digest.hexdigest()


def start(setting: str, folder: Path, *flags: str, resumed: bool) -> "subprocess.Popen[str]":
    """Start a process that trains."""
    options = os.environ.get("XLA_FLAGS", "")
    if setting == "frozen":
        file = folder / "autotuned.txt"
        options += " --xla_gpu_deterministic_ops=true --xla_gpu_"
        options += f"load_autotune_results_from={file}" if resumed else f"dump_autotune_results_to={file}"
    environment = {**os.environ, "XLA_FLAGS": options, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "benchmarks.gpu_check.resume", setting, str(folder), str(int(resumed)), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def main(rehearse: bool) -> int:
    """Print a result for each setting; return 1 if the bits differ where they must not."""
    flags = ["--rehearse"] if rehearse else []
    digests: dict[str, list[str]] = {setting: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as name:
        for resumed in (False, True):
            note("resuming" if resumed else "training")
            with ExitStack() as stack:  # side by side, since nothing is timed
                started = [
                    (setting, stack.enter_context(start(setting, Path(name), *flags, resumed=resumed)))
                    for setting in SETTINGS
                ]
                for setting, process in started:
                    digests[setting].append(process.communicate()[0].strip())
        has_choices = (Path(name) / "autotuned.txt").exists()
    for setting, (whole, parts) in digests.items():
        same = whole == parts if whole and parts else None
        choices = {"autotuning_was_saved": has_choices} if setting == "frozen" else {}
        emit("resumed", setting=setting, same_bits=same, required=setting == "deterministic", **choices)
    whole, parts = digests["deterministic"]
    return int(not whole or whole != parts)


if __name__ == "__main__":
    rehearsing = "--rehearse" in sys.argv
    if len(sys.argv) > 3:
        print(train(sys.argv[1], Path(sys.argv[2]), resumed=sys.argv[3] == "1", sizes=SIZES[rehearsing]))
    else:
        sys.exit(main(rehearsing))
