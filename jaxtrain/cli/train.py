"""`jaxtrain train`: train a recipe into a run folder."""

import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jaxtrain
from jaxtrain.cli.compilation_cache import enable_compilation_cache
from jaxtrain.cli.named_recipe import recipe_name
from jaxtrain.cli.profile import print_time_table
from jaxtrain.cost import device_memory, format_bytes
from jaxtrain.distributed import processes
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse_both, parse_known
from jaxtrain.observe import (
    Console,
    JsonConsole,
    MLflow,
    QuietConsole,
    Tracker,
    WandB,
    track_run,
)
from jaxtrain.planning import choice_notes, format_settings, plan
from jaxtrain.profile import LoopTrace, newest_trace, time_table
from jaxtrain.recipes import named_recipe
from jaxtrain.run import Recipe
from jaxtrain.run_folder import (
    RunFolder,
    default_folder,
    environment_changes,
    read_config,
    recorded_config,
)
from jaxtrain.runner import (
    announce,
    check_free,
    check_resumed,
    check_settings,
    conclude,
    run_training,
    stored_recipe,
    write_end,
)


@dataclass(frozen=True)
class Train:
    """Options of `jaxtrain train` besides the recipe's fields."""

    out: Path | None = None
    """The run's folder; runs/RECIPE by default."""
    resume: Annotated[bool | Literal["auto"], Flag(metavar="auto", bare=lambda: True, choices=("auto",))] = False
    """Continue the run in the folder from its newest checkpoint; auto: start it if there is none."""
    from_: Annotated[Path | None, Flag(name="from")] = None
    """Repeat the run of this config.json; other flags override its settings."""
    micro_batch: Annotated[Literal["auto"] | None, Flag(metavar="auto")] = None
    """Choose --accumulate and --remat of a new run as jaxtrain plan does."""
    profile: Annotated[str | None, Flag(metavar="A:B")] = None
    """Trace steps A to B - 1 into the run's profile/ and print where their time goes."""
    show_data: bool = False
    """Print training examples as the model reads them, and train nothing."""
    quiet: bool = False
    """Print only warnings, to standard error."""
    json_: Annotated[bool, Flag(name="json")] = False
    """Print one JSON object per event and line."""
    wandb: Annotated[str | None, Flag(metavar="PROJECT", bare=lambda: "jaxtrain")] = None
    """Also report the run to Weights & Biases, to project jaxtrain by default."""
    mlflow: Annotated[str | None, Flag(metavar="URI", bare=lambda: _mlflow_uri())] = None
    """Also report the run to MLflow, to MLFLOW_TRACKING_URI or sqlite:///mlflow.db by default."""


def main(args: list[str]) -> int:
    """Train, in step with the run's other processes if there are any."""
    with processes.process_group():
        return _train(args)


def _train(args: list[str]) -> int:
    """Parse, train, report."""
    name, flags = recipe_name(args)
    named = name if args and not args[0].startswith("-") else None
    options, flags = parse_known(Train(), flags, "jaxtrain train")
    base = None
    if options.from_:
        name, base = read_config(options.from_, named, f"--from {options.from_}")
        _check_recipe(name, named, options.from_)
    run = RunFolder(options.out) if options.out else default_folder(name)
    resumes = options.resume is True or (options.resume == "auto" and run.config.exists())
    if resumes:
        name, recipe = _resumed_recipe(run, named, options, flags)
    else:
        recipe = parse_recipe(base or named_recipe(name), name, options, flags)
    if options.show_data:
        return _show_data(name, recipe)
    console, trackers = _console(options), _trackers(options)
    trace = _trace(options.profile, run, recipe) if options.profile and processes.is_first() else None
    cache = f"compilation cache {enable_compilation_cache()}"
    announce(console, name, recipe, run, resumes=resumes, version=f"jaxtrain {jaxtrain.__version__}", cache=cache)
    if options.from_:
        for difference in environment_changes(recorded_config(options.from_)):
            console.message(f"{options.from_} was written with {difference}: results may not be bit-identical")
    if options.micro_batch and not resumes:
        recipe = _planned_recipe(recipe, run, console)
    with track_run(run, trackers, console.message) as ended:
        outcome = run_training(name, recipe, run, resume=options.resume, console=console, trace=trace)
        if not processes.is_first():
            return outcome.exit_status
        metrics = write_end(name, recipe, run, outcome)
        ended(outcome.exit_status)
    places = {
        "run": str(run.path),
        "report": str(run.report),
        "continue": f"jaxtrain train {name} --resume --out {run.path} --steps N",
    }
    if outcome.sample:
        console.sample(outcome.sample)
        if outcome.task.continue_text:
            places["more text"] = f"jaxtrain sample {run.path}"
    if outcome.task.reply:
        places["talk to it"] = f"jaxtrain sample {run.path}"
    if outcome.task.pretrained:
        places["export"] = f"jaxtrain export {run.path} --format huggingface"
    conclude(console, outcome, metrics, places, f"jaxtrain train {name} --resume --out {run.path}")
    if trace:
        _report_trace(trace, run, console)
    return outcome.exit_status


def parse_recipe(recipe: Recipe, name: str, options: Train, flags: list[str]) -> Recipe:
    """Return `recipe` with the fields replaced that `flags` sets. --help prints the flags of both and exits."""
    return parse_both(options, recipe, flags, f"jaxtrain train {name}", inspect.getdoc(type(recipe)))[1]


def _show_data(name: str, recipe: Recipe) -> int:
    check_settings(recipe)
    show = recipe.task().show_data
    if show is None:
        raise UserError(f"{name} has no page of examples: define Task.show_data, or omit --show-data")
    show()
    return 0


def _mlflow_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def _console(options: Train) -> Console:
    if options.quiet and options.json_:
        raise UserError("--quiet and --json are mutually exclusive: use one of them")
    return QuietConsole() if options.quiet else JsonConsole() if options.json_ else Console()


def _trackers(options: Train) -> list[Tracker]:
    """Return the requested trackers in the first process, none in others. Raises `UserError` for a missing package."""
    requested: list[tuple[str | None, Callable[[str], Tracker]]] = [(options.wandb, WandB), (options.mlflow, MLflow)]
    trackers = [tracker(where) for where, tracker in requested if where is not None]
    for name in (tracker.name for tracker in trackers):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--{name} needs the package {name}: pip install 'jaxtrain[{name}]'")
    return trackers if processes.is_first() else []


def _check_recipe(name: str, named: str | None, where: Path) -> None:
    """Raise `UserError` if the command line names another recipe than `where` holds."""
    if named not in (None, name):
        raise UserError(f"{where} holds a run of {name}, not of {named}: omit {named}, or use another folder or config")


def _resumed_recipe(run: RunFolder, named: str | None, options: Train, flags: list[str]) -> tuple[str, Recipe]:
    """Return the run's recipe, with the settings replaced that a resumed run may change."""
    name, saved = stored_recipe(run, named)
    _check_recipe(name, named, run.path)
    recipe = parse_recipe(saved, name, options, flags)
    check_resumed(saved, recipe)
    return name, recipe


def _planned_recipe(recipe: Recipe, run: RunFolder, console: Console) -> Recipe:
    """Return `recipe` with the fastest micro-batch size and rematerialization that fit the device's memory."""
    processes.once(lambda: check_free(run))
    memory = device_memory()
    report: Callable[[Recipe], None] = lambda candidate: console.message(f"compiling {format_settings(candidate)}")  # noqa: E731
    found = plan(recipe, memory, report, precisions=[recipe.precision])
    share = f"{format_bytes(found.chosen.peak_bytes)} of {format_bytes(memory)}"
    console.message(f"chosen: {format_settings(found.chosen.recipe)}: {share}")
    for note in choice_notes(found):
        console.message(note)
    return found.chosen.recipe


def _trace(steps: str, run: RunFolder, recipe: Recipe) -> LoopTrace:
    begin, _, end = steps.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and 1 <= int(begin) < int(end) <= recipe.steps + 1):
        raise UserError(
            f"--profile must be a range A:B of steps from 1 to {recipe.steps}, got {steps!r}: use one such as 10:20"
        )
    return LoopTrace(run.path / "profile", int(begin), int(end))


def _report_trace(trace: LoopTrace, run: RunFolder, console: Console) -> None:
    if not trace.done:
        console.message(f"no trace: the run executed none of the steps {trace.steps.start} to {trace.steps[-1]}")
        return
    path = newest_trace(run.path / "profile")
    if type(console) is Console:  # neither --quiet nor --json
        print_time_table(console.rich, time_table(path, trace.hlo), len(trace.steps))
    console.message(f"trace: {path}")
