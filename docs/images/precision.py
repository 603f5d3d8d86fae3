"""Draw docs/images/precision.svg, what float16 loses without a loss scale and with one.

Run `python -m docs.images.precision`.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jaxtrain as jt
from jaxtrain.observe import read_record
from jaxtrain.observe.precision_figure import precision_figure
from jaxtrain.pages import Chart, svg
from jaxtrain.recipes import RECIPES

HERE = Path(__file__).parent
SCALES = {
    "without a loss scale": "static_loss_scale(scale=1.0)",
    "loss scale 65536": "static_loss_scale(scale=65536.0)",
}
STEPS, WIDTH = 41, 630
SMALL: dict[str, Any] = {"steps": STEPS, "precision": "fp16", "n_layer": 6, "n_embd": 64}


def figure(folder: Path, title: str, loss_scale: str) -> Chart:
    """Train a small model and return the figure of its gradients at the last step."""
    small = dataclasses.replace(RECIPES["gpt-stdlib"], **SMALL)
    recipe = dataclasses.replace(small, loss_scale=loss_scale, watch_precision=STEPS - 1, eval_every=STEPS)
    run = jt.fit(recipe, folder / title, quiet=True).run
    line = read_record(run).precision
    assert line is not None
    assert line.precision is not None
    chart = precision_figure(line.precision, title, ["activation_gradients", "weight_gradients"])
    assert chart is not None
    return chart


def main() -> None:
    """Train both, and write the figures side by side."""
    with tempfile.TemporaryDirectory() as folder:
        figures = [figure(Path(folder), title, scale) for title, scale in SCALES.items()]
    (HERE / "precision.svg").write_text(svg(figures, WIDTH))


if __name__ == "__main__":
    main()
