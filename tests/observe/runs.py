"""Write run folders without training."""

import json
from pathlib import Path

from jaxtrain.run_folder import RunFolder

CONFIG = {
    "recipe": "digits-mlp",
    "settings": {"steps": 40, "batch_size": 8, "lr": 0.01, "precision": "fp16", "data": None},
    "versions": {"jax": "0.10.1"},
    "python": "3.11.7",
    "devices": ["cpu"],
    "command": ["jaxtrain", "train"],
    "started": "2026-01-02T03:04:05+00:00",
}


def line(step: int) -> dict:
    """Return a metrics line of a run that skips the update of step 20."""
    skipped = int(step == 20)
    return {
        "step": step,
        "loss": 4.0 / (1 + step),
        "grad_norm": None if skipped else 0.5,
        "loss_scale": 65536.0 / (1 + (step >= 20)),
        "skipped": skipped,
        "examples_per_s": 400.0,
        "step_time_s": 0.02,
        "peak_memory_bytes": 2**28,
        "lr": 0.01,
        **({"eval_loss": 3.0 / (1 + step), "eval_accuracy": step / 40} if step % 20 == 0 else {}),
    }


def write_run(path: Path, steps: int = 40, **settings) -> RunFolder:
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.config.write_text(json.dumps({**CONFIG, "settings": {**CONFIG["settings"], **settings}}))
    first = {"step": 0, "eval_loss": 3.0, "eval_accuracy": 0.1}
    lines = [first, *(line(step) for step in range(10, steps + 1, 10))]
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return run
