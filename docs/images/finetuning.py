"""Measure fine-tuning on three seeds, and draw docs/images/finetuning.svg: `python -m docs.images.finetuning FOLDER`.

The runs are those of docs/tutorials/finetuning.md, for each seed. FOLDER keeps them; runs that it has are not repeated.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, pstdev

from jaxtrain.pages import Chart, Panel, between, curve, linear, svg, whole

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
COLORS = {"lora": "c0", "full": "c1"}
FINETUNE = "train finetune --model tiny-{seed} --data pairs --seq-len 256 --batch-size 8 --seed {seed}"
COMMANDS = {
    "pairs": "data stdlib-pairs",
    "base-{seed}": "train llama-stdlib --seq-len 256 --batch-size 8 --eval-every 200 --seed {seed}",
    "tiny-{seed}": "export base-{seed} --format huggingface",
    "lora-{seed}": f"{FINETUNE} --lr 5e-3",
    "full-{seed}": f"{FINETUNE} --lr 2e-3 --method full",
}
"""Commands by what they write."""


def run(folder: Path) -> None:
    """Run the commands in a folder, but for those whose results it has."""
    folder.mkdir(exist_ok=True)
    for seed in SEEDS:
        for out, command in COMMANDS.items():
            path = folder / out.format(seed=seed)
            if not path.exists():
                words = [*command.format(seed=seed).split(), "--out", path.name]
                start = time.perf_counter()
                subprocess.run([sys.executable, "-m", "jaxtrain.cli", *words], cwd=folder, check=True)
                with (folder / "minutes.jsonl").open("a") as file:
                    file.write(json.dumps({path.name: round((time.perf_counter() - start) / 60, 2)}) + "\n")


def held_out(run: Path) -> list[tuple[int, float]]:
    """Return the held-out loss of a run by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def losses(folder: Path) -> dict[str, list[float]]:
    """Return the held-out loss of the answers of every seed: pretrained, with adapters, and fully fine-tuned."""
    lora, full = ([held_out(folder / f"{name}-{seed}") for seed in SEEDS] for name in ("lora", "full"))
    return {
        "pretrained": [points[0][1] for points in lora],
        "LoRA": [points[-1][1] for points in lora],
        "full": [points[-1][1] for points in full],
    }


def table(folder: Path) -> str:
    """Return the losses as rows of a Markdown table."""
    rows = losses(folder).items()
    each = lambda values: ", ".join(f"{value:.3f}" for value in values)  # noqa: E731
    return "\n".join(f"| {name} | {each(x)} | {mean(x):.3f} | {pstdev(x):.3f} |" for name, x in rows)


def draw(folder: Path) -> None:
    """Draw the held-out losses of all seeds."""
    runs = {(name, seed): held_out(folder / f"{name}-{seed}") for name in COLORS for seed in SEEDS}
    last, start = max(step for points in runs.values() for step, _ in points), mean(losses(folder)["pretrained"])
    x, y = between(0, last, whole(0, last)), linear([start, *(loss for points in runs.values() for _, loss in points)])
    curves = [(COLORS[name], curve(points, x, y)) for (name, _), points in runs.items()]
    chart = Chart(
        "Answers about modules that no run has read",
        x,
        [Panel("held-out loss, nats per byte", y, curves, [(start, "pretrained, mean")], height=220)],
        label="step",
        key=[(COLORS["lora"], "LoRA"), (COLORS["full"], "all weights")],
    )
    (HERE / "finetuning.svg").write_text(svg([chart], 620))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
    print(table(Path(sys.argv[1])))
    draw(Path(sys.argv[1]))
