"""Measure fine-tuning on three seeds, and draw docs/images/finetuning.svg: `python -m docs.images.finetuning FOLDER`.

The runs are those of docs/tutorials/finetuning.md, for each seed. FOLDER keeps them; runs that it has are not repeated.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, pstdev

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
FULL, LORA, PRETRAINED, INK = "#c2410c", "#1d4ed8", "#52525b", "#52525b"
FINETUNE = "train finetune --model tiny-{seed} --data pairs --seq-len 256 --batch-size 8 --seed {seed}"
COMMANDS = {
    "pairs": "data stdlib-pairs",
    "base-{seed}": "train llama-stdlib --seq-len 256 --batch-size 8 --eval-every 200 --seed {seed}",
    "tiny-{seed}": "export base-{seed} --format huggingface",
    "lora-{seed}": f"{FINETUNE} --lr 5e-3",
    "full-{seed}": f"{FINETUNE} --lr 2e-3 --method full",
}
"""Commands by what they write."""

Curve = list[tuple[int, float]]


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


def curve(run: Path) -> Curve:
    """Return the held-out loss of a run by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def losses(folder: Path) -> dict[str, list[float]]:
    """Return the held-out loss of the answers of every seed: pretrained, with adapters, and fully fine-tuned."""
    lora, full = ([curve(folder / f"{name}-{seed}") for seed in SEEDS] for name in ("lora", "full"))
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
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "finetuning", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, label, color in (("lora", "LoRA", LORA), ("full", "all weights", FULL)):
        for seed in SEEDS:
            steps, values = zip(*curve(folder / f"{name}-{seed}"), strict=True)
            axes.plot(steps, values, color=color, linewidth=1.2, marker="o", markersize=2.5, label=seed or label)
    start = mean(losses(folder)["pretrained"])
    axes.axhline(start, color=PRETRAINED, linewidth=0.8, linestyle=":")
    axes.annotate("pretrained, mean", (steps[-1], start), (0, 3), textcoords="offset points", color=INK, ha="right")
    handles = [line for line in axes.get_lines() if str(line.get_label()) in ("LoRA", "all weights")]
    axes.set(xlabel="step", ylabel="held-out loss, nats per byte", title="Answers about modules that no run has read")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    axes.tick_params(colors=INK)
    axes.legend(handles=handles, frameon=False, loc="center right")
    figure.savefig(HERE / "finetuning.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
    print(table(Path(sys.argv[1])))
    draw(Path(sys.argv[1]))
