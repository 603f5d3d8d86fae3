"""`jaxtrain eval DIR`: list the examples on which a trained model has the highest loss."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxtrain.cli.flags import parse, run_folder_argument
from jaxtrain.errors import UserError
from jaxtrain.observe import ErrorAnalysis, error_summary, log_error_analysis, write_error_page
from jaxtrain.run import Media, split_media
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import analyze_errors, read_recipe, restore_state
from jaxtrain.step import averaged


@dataclass(frozen=True)
class Eval:
    """Evaluate a run's newest checkpoint as the run itself does, and list the examples with the highest loss."""

    split: Literal["validation", "train"] = "validation"
    """validation: the examples of the run's evaluations; train: the same number of training examples."""
    worst: int = 10
    """Number of examples to show."""
    json: Path | None = None
    """Also write the metrics to this JSON file."""
    out: Path | None = None
    """The page; DIR/eval/step-N-SPLIT.html by default."""


def main(args: list[str]) -> int:
    """Parse, restore, evaluate, write, print."""
    name, flags = run_folder_argument(args, "jaxtrain eval DIR [--worst N] [--out PAGE.html]")
    run = RunFolder(Path(name))
    options = parse(Eval(), flags, f"jaxtrain eval {run.path}")
    if options.worst < 1:
        raise UserError(f"--worst must be positive, got {options.worst}: use 1 or more")
    analysis, answers = evaluate_run(run, options.split)
    stem = f"step-{analysis.step}-{options.split}"
    folder = run.path / "eval"
    page, lines = options.out or folder / f"{stem}.html", folder / f"{stem}.jsonl"
    places = {"page": page, "examples": lines}
    try:
        folder.mkdir(exist_ok=True)
        lines.write_text("".join(json.dumps(line) + "\n" for line in analysis.lines()))
        for tag, files in answers.items():
            places[tag] = folder / f"{stem}.{tag}.{files[0].suffix}"
            places[tag].write_bytes(files[0].data)
        if options.json is not None:
            options.json.write_text(json.dumps(error_summary(analysis, options.worst), indent=2) + "\n")
        write_error_page(page, analysis, options.worst)
        log_error_analysis(run.tensorboard, analysis, options.worst)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror}): use another path") from error
    count = len(analysis.predictions)
    print(f"{run.path} · {analysis.recipe} · step {analysis.step} · {options.split}, {count:,} examples")
    print(" · ".join(f"{figure} {value:.4f}" for figure, value in analysis.figures().items()))
    worst = analysis.predictions.worst(options.worst)
    print(f"\nthe {len(worst)} worst")
    for i in worst:
        print(f"  {i:>6}  loss {analysis.losses[i]:7.3f}  {analysis.describe(int(i))}")
    print("", *(f"{name:9} {path}" for name, path in places.items()), sep="\n")
    return 0


def evaluate_run(run: RunFolder, split: str) -> tuple[ErrorAnalysis, Media]:
    """Evaluate a run's newest checkpoint on a split, "validation" or "train".

    Args:
      run: Folder of the run.
      split: "validation" for the examples of the run's evaluations, "train" for as many training examples.

    Returns:
      A tuple (the loss and the prediction of each example, and the scores of its answers to all validation prompts if
      the run's task writes any; these answers).

    Raises:
      UserError: The folder holds no run, the run has no checkpoint, or its task no validation data or no `predict`.
    """
    name, recipe = read_recipe(run)
    task = recipe.task()
    state = restore_state(run.checkpoints, recipe, task)
    analysis = analyze_errors(name, recipe, task, state, split)
    if task.evaluate_answers is None or split != "validation":
        return analysis, {}
    scores, answers = split_media(task.evaluate_answers(averaged(state), True))
    return replace(analysis, metrics={**analysis.metrics, **scores}), answers
