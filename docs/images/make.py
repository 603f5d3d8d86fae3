"""Draw docs/images/train.svg, the README's picture, from a training run: `python docs/images/make.py`."""

import dataclasses
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console as RichConsole

from jaxtrain.observe import Console
from jaxtrain.observe.metrics import read_metrics
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import run_training

HERE = Path(__file__).parent
WIDTH = 96


def main() -> None:
    """Train the default recipe and save the console output as an image."""
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], log_every=100, eval_every=100)
    rich = RichConsole(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console = Console(rich)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        outcome = run_training("gpt-stdlib", recipe, run, resume=False, console=console)
        console.sample(outcome.sample or "")
        console.summary(read_metrics(run.metrics), outcome.task.references, {})
    svg = rich.export_svg(title="jaxtrain train")
    # Remove the fonts that rich links to, so that the image has no external resources.
    (HERE / "train.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
