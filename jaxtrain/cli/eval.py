"""`jaxtrain eval DIR`: what a trained model gets wrong, example by example."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxtrain.cli.arguments import parse
from jaxtrain.data import thinned
from jaxtrain.errors import UserError
from jaxtrain.observe import ErrorAnalysis, error_summary, evaluate_examples, log_error_analysis, write_error_page
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from jaxtrain.tasks import build, evaluation_batches


@dataclass(frozen=True)
class Eval:
    """Evaluate a run's newest checkpoint, as the run itself does, and list the examples it does worst on."""

    split: Literal["validation", "train"] = "validation"
    """validation: the examples of the run's own evaluations; train: as many of those it learned from."""
    worst: int = 10
    """Examples to show."""
    json: Path | None = None
    """A file for the figures."""
    out: Path | None = None
    """The page; DIR/eval/step-N-SPLIT.html by default."""


def main(args: list[str]) -> int:
    """Parse, restore, evaluate, write, tell."""
    if any(a in ("-h", "--help") for a in args):
        args = ["DIR", *args]
    if not args or args[0].startswith("-"):
        raise UserError("which run? jaxtrain eval DIR [--worst N] [--out PAGE.html]")
    run = RunFolder(Path(args[0]))
    asked = parse(Eval(), args[1:], f"jaxtrain eval {run.path}")
    if asked.worst < 1:
        raise UserError(f"worst {asked.worst} shows nothing: make it 1 or more")
    found = evaluated(run, asked.split)
    stem = f"step-{found.step}-{asked.split}"
    folder = run.path / "eval"
    page, lines = asked.out or folder / f"{stem}.html", folder / f"{stem}.jsonl"
    try:
        folder.mkdir(exist_ok=True)
        lines.write_text("".join(json.dumps(line) + "\n" for line in found.lines()))
        if asked.json is not None:
            asked.json.write_text(json.dumps(error_summary(found, asked.worst), indent=2) + "\n")
        write_error_page(page, found, asked.worst)
        log_error_analysis(run.tensorboard, found, asked.worst)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror}): choose another place") from error
    print(f"{run.path} · {found.recipe} · step {found.step} · {asked.split}, {len(found.predictions):,} examples")
    print(" · ".join(f"{figure} {value:.4f}" for figure, value in found.figures().items()))
    print(f"\nthe {len(found.predictions.worst(asked.worst))} worst")
    for i in found.predictions.worst(asked.worst):
        print(f"  {i:>6}  loss {found.means[i]:7.3f}  {found.said(int(i))}")
    print(f"\npage      {page}\nexamples  {lines}")
    return 0


def evaluated(run: RunFolder, split: str, most: int | None = None) -> ErrorAnalysis:
    """The run's newest checkpoint on a split, "validation" or "train": on `most` of its examples, None for all."""
    name, recipe = read_recipe(run)
    task = build(recipe)
    state = restore_state(run.checkpoints, recipe, task)
    source = task.validation if split == "validation" else thinned(task.train, task.eval_rows)
    source = source if most is None else thinned(source, most)
    means, predictions = evaluate_examples(
        task, state, evaluation_batches(source, task, recipe), precision=recipe.precision
    )
    return ErrorAnalysis(name, int(state.step), split, task, source, means, predictions)
