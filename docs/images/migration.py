"""Draw docs/images/migration.svg from the results of docs/migration.md: `python -m docs.images.migration`."""

import re
from pathlib import Path
from typing import Any

from jaxtrain.pages import Chart, Panel, Region, between, curve, linear, svg, whole

HERE = Path(__file__).parent
TORCH, JAX = "c1 broad", "c0"


def main() -> None:
    """Run the code of the page and draw its two loss curves."""
    page: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE.parent / "migration.md").read_text(), re.DOTALL):
        exec(block, page)
    theirs, ours = page["script"].losses, page["in_jax"]
    last = 50 + len(ours)
    x, y = between(0, last, whole(0, last)), linear([0.0, *theirs, *ours])
    curves = [(TORCH, curve(enumerate(theirs, start=1), x, y)), (JAX, curve(enumerate(ours, start=51), x, y))]
    chart = Chart(
        "GPT-2, float16 with a GradScaler, OneCycleLR",
        x,
        [Panel("loss, nats", y, curves, height=200)],
        label="step",
        key=[(TORCH, "PyTorch, uninterrupted"), (JAX, "JAX, from PyTorch's checkpoint")],
        regions=[Region(50.5, last, "shade", "after torch.save")],
    )
    (HERE / "migration.svg").write_text(svg([chart], 620))


if __name__ == "__main__":
    main()
