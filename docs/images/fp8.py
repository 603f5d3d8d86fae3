"""Train gpt-stdlib in bf16 and in fp8 from several seeds each: `python -m docs.images.fp8 FOLDER`.

FOLDER keeps the runs; those that it has are not repeated. The curves of ten seeds of a small model are written to
benchmarks/results/cpu-2-cores-fp8-curves.json and drawn in docs/images/fp8.svg, those of seven seeds of the recipe
itself to benchmarks/results/cpu-2-cores-fp8-curves-recipe.json, and the tests of the difference of the final losses are
printed. `pytest -m nightly tests/recipes/test_fp8_curves.py` does so with five seeds and short runs.
"""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from jaxtrain.pages import Chart, Panel, band, between, curve, linear, svg, whole

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks/results/cpu-2-cores-fp8-curves.json"
RESULTS_OF_RECIPE = RESULTS.with_stem(f"{RESULTS.stem}-recipe")
SEEDS, SEEDS_OF_RECIPE = range(10), range(7)
SIZE = "--n-layer 2 --n-embd 64 --seq-len 64 --eval-every 50 --eval-sequences 1024"
SIZE_OF_RECIPE = "--eval-every 50 --eval-sequences 512"
COLORS = {"bf16": "c7 broad", "fp8": "c1"}
HIGHEST = 3.0  # loss that is drawn


def run(folder: Path, precision: str, seed: int, size: str = SIZE) -> list[tuple[int, float]]:
    """Return the validation losses of a run by step."""
    path = folder / f"{precision}-{seed}"
    if not path.exists():
        words = f"train gpt-stdlib --precision {precision} --seed {seed} {size} --out {path}".split()
        subprocess.run([sys.executable, "-m", "jaxtrain.cli", *words], check=True)
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def final_losses(curves: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the last losses in bf16 and in fp8."""
    bf16, fp8 = (np.array([losses[-1][1] for losses in curves[precision]]) for precision in COLORS)
    return bf16, fp8


def compare(bf16: np.ndarray, fp8: np.ndarray) -> dict[str, float]:
    """Compare the final losses of the same seeds.

    Returns:
      "difference" of the means; "seed_sd", the standard deviation over the seeds of bf16; "p_permutation" of the
      difference as large in either direction if the labels of all runs were exchanged, of all divisions in two halves;
      "p_welch", that of Welch's t-test; "least" and "most", the ends of its 95% interval; "paired_sd",
      the standard deviation of the differences of a seed.
    """
    runs, n, difference = np.concatenate([bf16, fp8]), len(bf16), fp8.mean() - bf16.mean()
    halves = np.array([runs[list(half)].sum() for half in combinations(range(2 * n), n)])
    exchanged = np.abs(2 * halves - runs.sum()) / n
    welch = stats.ttest_ind(fp8, bf16, equal_var=False)
    interval = welch.confidence_interval(0.95)
    return {
        "difference": float(difference),
        "seed_sd": float(bf16.std(ddof=1)),
        "p_permutation": float(np.mean(exchanged >= abs(difference) - 1e-12)),
        "p_welch": float(welch.pvalue),
        "least": float(interval.low),
        "most": float(interval.high),
        "paired_sd": float((fp8 - bf16).std(ddof=1)),
    }


def draw(curves: dict[str, Any]) -> None:
    """Draw the mean of each precision and the range of its seeds."""
    steps, drawn = np.array(curves["bf16"][0])[:, 0], []
    shown = {precision: np.array(runs)[:, :, 1] for precision, runs in curves.items()}
    x = between(0, steps[-1], whole(0, int(steps[-1])))
    y = linear([loss for losses in shown.values() for loss in losses.ravel() if loss < HIGHEST])
    for precision, losses in shown.items():
        kept = losses.max(0) < HIGHEST
        mean, low, high = (getattr(losses, name)(0)[kept] for name in ("mean", "min", "max"))
        drawn.append((f"{COLORS[precision]} band", band(zip(steps[kept], low, high, strict=True), x, y)))
        drawn.append((COLORS[precision], curve(zip(steps[kept], mean, strict=True), x, y)))
    panel = Panel("validation loss, nats per byte", y, drawn, height=200)
    key = [(color, precision) for precision, color in COLORS.items()]
    chart = Chart("gpt-stdlib: mean and range of ten seeds", x, [panel], "step", key)
    (HERE / "fp8.svg").write_text(svg([chart], 620))


def measure(folder: Path, seeds: range, size: str, results: Path) -> dict[str, Any]:
    """Train from all seeds in both precisions; write and return the curves and their comparison."""
    from parity.attestation import environment

    curves = {precision: [run(folder, precision, seed, size) for seed in seeds] for precision in COLORS}
    comparison = compare(*final_losses(curves))
    found = {"environment": environment(), "flags": size, "comparison": comparison, "curves": curves}
    results.write_text(json.dumps(found) + "\n")
    print(results.name, json.dumps(comparison, indent=2))
    return curves


if __name__ == "__main__":
    runs = Path(sys.argv[1])
    draw(measure(runs / "small", SEEDS, SIZE, RESULTS))
    measure(runs / "recipe", SEEDS_OF_RECIPE, SIZE_OF_RECIPE, RESULTS_OF_RECIPE)
