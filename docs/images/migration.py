"""Draw docs/images/migration.svg from the results of docs/migration.md: `python docs/images/migration.py`."""

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TORCH, JAX, INK = "#c2410c", "#1d4ed8", "#52525b"


def main() -> None:
    """Run the code of the page and draw its two loss curves."""
    page: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE.parent / "migration.md").read_text(), re.DOTALL):
        exec(block, page)
    theirs, ours = page["script"].losses, page["in_jax"]
    plt.rcParams |= {"svg.hashsalt": "migration", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(range(1, len(theirs) + 1), theirs, color=TORCH, linewidth=3.5, alpha=0.45, label="PyTorch, uninterrupted")
    axes.plot(range(51, 51 + len(ours)), ours, color=JAX, linewidth=1.2, label="JAX, from PyTorch's checkpoint")
    axes.axvline(50.5, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("saved by torch.save", (50.5, theirs[0]), (5, -4), textcoords="offset points", color=INK)
    axes.set(xlabel="step", ylabel="loss, nats", ylim=(0, None), title="GPT-2, float16 with a GradScaler, OneCycleLR")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(HERE / "migration.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
