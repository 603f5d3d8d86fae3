"""`jaxtrain eval DIR`: evaluate a trained model, and list the examples on which it has the highest loss.

A task without `predict`, such as that of preferences, has no predictions of single examples: its metrics are printed.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.flags import Flag, parse
from jaxtrain.folder_files import make_folder, new_file, write_file
from jaxtrain.observe import error_summary, log_error_analysis, write_error_page
from jaxtrain.run import Media, Recipe, Task, split_media
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import analyze_errors, held_out_evaluation, read_recipe, restore_state
from jaxtrain.step import TrainState, averaged


@dataclass(frozen=True)
class Eval:
    """Evaluate a run's newest checkpoint as the run itself does, and list the examples with the highest loss."""

    folder: Annotated[str, Flag(positional=True, metavar="DIR")] = ""
    """The run's folder."""
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
    options = parse(Eval(), args, "jaxtrain eval")
    run = RunFolder(Path(options.folder))
    if options.worst < 1:
        raise UserError(f"--worst must be positive, got {options.worst}: use 1 or more")
    recipe_name, recipe = read_recipe(run)
    task = recipe.task()
    evaluate = _evaluate_whole if task.predict is None else _evaluate_examples
    evaluate(run, recipe_name, recipe, task, options)
    return 0


def _evaluate_examples(run: RunFolder, name: str, recipe: Recipe, task: Task, options: Eval) -> None:
    """Evaluate example by example; write the page and the losses, print the worst."""
    state = restore_state(run.checkpoints, recipe, task)
    analysis = analyze_errors(name, recipe, task, state, options.split)
    scores, answers = _answers(task, state) if options.split == "validation" else ({}, {})
    analysis = replace(analysis, metrics={**analysis.metrics, **scores})
    stem = f"step-{analysis.step}-{options.split}"
    with _folder(run) as folder:
        page, lines = options.out or folder / f"{stem}.html", folder / f"{stem}.jsonl"
        with new_file(lines, run.path) as file:
            file.writelines(f"{json.dumps(line)}\n".encode() for line in analysis.lines())
        places = {"page": page, "examples": lines, **_write_answers(folder, stem, answers)}
        _write_json(options.json, error_summary(analysis, options.worst))
        write_error_page(page, analysis, options.worst)
        log_error_analysis(run.tensorboard, analysis, options.worst)
    count = len(analysis.predictions)
    print(f"{escape_unprintable(f'{run.path} · {name}')} · step {analysis.step} · {options.split}, {count:,} examples")
    _print_figures(analysis.figures())
    worst = analysis.predictions.worst(options.worst)
    print(f"\nthe {len(worst)} worst")
    for i in worst:
        print(f"  {i:>6}  loss {analysis.losses[i]:7.3f}  {escape_unprintable(analysis.describe(int(i)))}")
    _print_places(places)


def _evaluate_whole(run: RunFolder, name: str, recipe: Recipe, task: Task, options: Eval) -> None:
    """Evaluate the held-out data as the run does; print the metrics."""
    if options.out is not None or options.split != "validation":
        raise UserError(
            f"--out and --split train need predictions of single examples, and this task of {name} has no `predict`: "
            "omit them"
        )
    if task.validation is None and task.evaluate is None:
        raise UserError(f"{name} has no validation data: define Task.validation")
    state = restore_state(run.checkpoints, recipe, task)
    metrics = held_out_evaluation(replace(task, evaluate_answers=None), recipe)(state).metrics
    scores, answers = _answers(task, state)
    metrics, step = {**metrics, **scores}, int(state.step)
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    with _folder(run) as folder:
        places = _write_answers(folder, f"step-{step}-validation", answers)
        _write_json(options.json, {"recipe": name, "step": step, "split": "validation", **finite})
    print(f"{escape_unprintable(f'{run.path} · {name}')} · step {step} · validation")
    _print_figures(metrics)
    _print_places(places)


def _answers(task: Task, state: TrainState) -> tuple[dict[str, float], Media]:
    """Return (the scores of answers to all validation prompts, these answers); nothing if the task writes none."""
    return ({}, {}) if task.evaluate_answers is None else split_media(task.evaluate_answers(averaged(state), True))


@contextmanager
def _folder(run: RunFolder) -> Iterator[Path]:
    """Create the folder of evaluations; a file that cannot be written is a `UserError`."""
    folder = run.path / "eval"
    try:
        make_folder(folder)
        yield folder
    except OSError as error:
        where = error.filename or folder  # a full disk has no file name
        raise UserError(f"{where} cannot be written ({error.strerror}): use another path") from error


def _write_answers(folder: Path, stem: str, answers: Media) -> dict[str, Path]:
    places = {tag: folder / f"{stem}.{tag}.{files[0].suffix}" for tag, files in answers.items()}
    for tag, path in places.items():
        write_file(path, answers[tag][0].data)
    return places


def _write_json(path: Path | None, values: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(values, indent=2) + "\n")


def _print_figures(figures: dict[str, float]) -> None:
    print(" · ".join(f"{figure} {value:.4f}" for figure, value in figures.items()))


def _print_places(places: dict[str, Path]) -> None:
    if places:
        print("", *(escape_unprintable(f"{name:9} {path}") for name, path in places.items()), sep="\n")
