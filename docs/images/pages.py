"""Take screenshots of reports of training runs: `python -m docs.images.pages`; needs chromium and chromium-driver."""

import dataclasses
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console as RichConsole

from jaxtrain.cli import main as jaxtrain
from jaxtrain.observe import Console, LogLine, QuietConsole
from jaxtrain.observe.console import ProgressView
from jaxtrain.observe.live import LivePanel
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import run_training, write_end
from parity.cli import main as parity
from tests.observe.browser import Browser, browser

HERE = Path(__file__).parent
SMALL = {"n_layer": 2, "n_embd": 64, "steps": 400}
RUNS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16", "loss_scale": "dynamic_loss_scale(growth_interval=25)"},
    "fp32": {},
    "lr-0.03": {"lr": 0.03, "clip_norm": 0.1},
}


class PanelConsole(QuietConsole):
    """Record the panel as a terminal shows it after a given step."""

    def __init__(self, step: int) -> None:
        super().__init__(RichConsole(record=True, width=88, file=io.StringIO(), highlight=False, force_terminal=True))
        self._at = step

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """Create the panel."""
        self._panel = LivePanel(start, total, unit)
        yield self

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        """Update the panel, and record it at the given step."""
        self._panel.advance(step, line)
        if step == self._at:
            self.rich.print(self._panel)


def main() -> None:
    """Train the runs, write their reports and take screenshots."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        panel = PanelConsole(step=280)
        for name, settings in RUNS.items():
            train("gpt-stdlib", name, panel if name == "fp16" else QuietConsole(), **SMALL, **settings)
        svg = panel.rich.export_svg(title="jaxtrain train")
        # Remove the fonts that rich links to, so that the image has no external resources.
        (HERE / "live.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))
        train("digits-cnn", "digits", QuietConsole(), steps=150)
        train("gpt-stdlib", "gpt", QuietConsole(), **{**SMALL, "steps": 120})
        for command in (
            "eval gpt --worst 12 --out eval.html",
            "eval digits --worst 12",
            "report digits",
            "report fp16 fp32 lr-0.03",
        ):
            assert jaxtrain(command.split()) == 0
        assert parity(["run", "mlp", "cnn", "gpt2", "llama", "--html", "parity.html"]) == 0
        with browser(Path(folder, "profile")) as window:
            screenshot(window, Path("fp16/report.html"), "report.png", 1100, 1480)
            screenshot(window, Path("comparison.html"), "report-compared.png", 1100, 860, dark=True)
            screenshot(window, Path("digits/report.html"), "report-narrow.png", 420, 1460)
            screenshot(window, Path("eval.html"), "eval.png", 1000, 1040)
            screenshot(window, Path("parity.html"), "parity.png", 1100, 440)
        os.chdir(HERE)


def train(name: str, out: str, console: Console, **settings: Any) -> None:
    """Train a recipe and write its report."""
    run, recipe = RunFolder(Path(out)), dataclasses.replace(RECIPES[name], **settings)
    write_end(name, recipe, run, run_training(name, recipe, run, resume=False, console=console))


def screenshot(window: Browser, page: Path, name: str, width: int, height: int, *, dark: bool = False) -> None:
    """Save the upper part of a page as an image with 256 colors."""
    window.open(page.absolute().as_uri())
    window.screenshot(HERE / name, width, dark=dark)
    assert window.complaints() == []
    with Image.open(HERE / name) as whole:
        whole.crop((0, 0, width, min(height, whole.height))).quantize(256).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
