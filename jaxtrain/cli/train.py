"""`jaxtrain train`: train a recipe into a run folder."""

import argparse
import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

import jaxtrain
from jaxtrain.cli import nearest
from jaxtrain.cli.arguments import parse
from jaxtrain.cli.compiled_programs import keep_compiled_programs
from jaxtrain.cli.eval import evaluated
from jaxtrain.cli.profile import tell
from jaxtrain.cost import device_memory, shown_bytes
from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe import (
    Console,
    JsonConsole,
    MLflow,
    QuietConsole,
    Tracker,
    WandB,
    log_error_analysis,
    log_final,
    read_metrics,
    read_record,
    track_run,
    write_report,
    write_result,
)
from jaxtrain.planning import in_words, notes, plan
from jaxtrain.profile import LoopTrace, newest_trace, time_table
from jaxtrain.recipes import RECIPES, ImageRecipe, LanguageRecipe, Recipe
from jaxtrain.run_folder import RunFolder, environment, read_config
from jaxtrain.runner import Outcome, check_free, fit, read_recipe

# Examples that TensorBoard shows: those that a classifier does worst on, of so many that it is asked about.
_WORST, _ASKED = 8, 512
# Of a resumed run these may change; any other change would make it another run.
_MAY_CHANGE = {
    *("steps", "log_every", "eval_every", "save_every", "keep_last", "keep_best", "keep_every"),
    *("histograms", "max_skips", "spike_factor", "on_spike", "stall_seconds", "allow_recompile"),
    *("mesh", "accumulate"),
}


@dataclass(frozen=True)
class Train:
    """Train a recipe."""

    recipe: Recipe
    out: Path | None = None
    """The run's folder; runs/RECIPE by default."""
    resume: Annotated[bool | Literal["auto"], tyro.conf.arg(metavar="[auto]")] = False
    """Continue the run in the folder from its newest checkpoint; auto: if there is one, else begin it."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A run's config.json, to repeat that run; flags change its settings."""
    micro_batch: Annotated[Literal["auto"] | None, tyro.conf.arg(metavar="auto")] = None
    """Choose --accumulate and --remat, of a new run, as jaxtrain plan does."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="A:B")] = None
    """Trace steps A to B - 1 into the run's profile/, and say where their time goes."""
    quiet: bool = False
    """Print nothing but what goes out of the ordinary, to standard error."""
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print a JSON object a line, each with an event."""
    wandb: Annotated[str | None, tyro.conf.arg(metavar="[PROJECT]")] = None
    """Tell the run to Weights & Biases as well; project jaxtrain if none is named."""
    mlflow: Annotated[str | None, tyro.conf.arg(metavar="[URI]")] = None
    """Tell the run to MLflow as well; MLFLOW_TRACKING_URI, or sqlite:///mlflow.db, if no URI is named."""


def main(args: list[str]) -> int:
    """Train, together with what other processes the run has."""
    with processes.together():
        return _train(args)


def _train(args: list[str]) -> int:
    """Parse, train, report."""
    name, flags = recipe_name(args)
    named = name if args[:1] == [name] else None
    place, flags = _place(flags)
    if place.from_:
        name = _agreed(read_config(place.from_)[0], named, place.from_)
    run = RunFolder(place.out or Path("runs") / name)
    resumed = place.resume is True or (place.resume and run.config.exists())
    if resumed:
        name, recipe = _resumed(run, named, place, flags)
    else:
        base = read_config(place.from_)[1] if place.from_ else RECIPES[name]
        recipe = _parse(base, name, place, flags).recipe
    console, trackers = _console(place), _trackers(place)
    trace = _trace(place.profile, run, recipe) if place.profile and processes.is_first() else None
    device = jax.devices()[0]
    console.headline(
        f"jaxtrain {jaxtrain.__version__} · {name} · {jax.device_count()} {device.device_kind} · {run.path} · "
        f"compiled programs are kept in {keep_compiled_programs()}"
    )
    if place.from_:
        for difference in _differences(json.loads(place.from_.read_text())):
            console.message(f"{place.from_} was made with {difference}: the bits may differ")
    if place.micro_batch and not resumed:
        recipe = _fitted(recipe, run, console)
    with track_run(run, trackers if processes.is_first() else [], console.message) as ended:
        outcome = fit(name, recipe, run, resume=place.resume, console=console, trace=trace)
        if not processes.is_first():
            return outcome.exit_status
        _write_end(run, recipe, outcome)
        ended(outcome.exit_status)
    metrics = read_metrics(run.metrics)
    places = {
        "run": str(run.path),
        "report": str(run.report),
        "continue": f"jaxtrain train {name} --resume --out {run.path} --steps N",
    }
    if outcome.sample:
        console.sample(outcome.sample)
        if isinstance(recipe, LanguageRecipe):
            places["more text"] = f"jaxtrain sample {run.path}"
    console.summary(metrics, outcome.references, places)
    if trace:
        _tell_trace(trace, run, console)
    if outcome.exit_status:
        console.message(f"stopped and saved at step {outcome.step}: jaxtrain train {name} --resume --out {run.path}")
    return outcome.exit_status


def _write_end(run: RunFolder, recipe: Recipe, outcome: Outcome) -> None:
    """What there is to say once a run has ended. Raises `RunFailed` where the system refuses."""
    try:
        write_result(run, step=outcome.step, references=outcome.references, sample=outcome.sample)
        record = read_record(run)
        log_final(run.tensorboard, record)
        # Of several processes none could read the checkpoint alone.
        if not outcome.exit_status and isinstance(recipe, ImageRecipe) and processes.count() == 1:
            log_error_analysis(run.tensorboard, evaluated(run, "validation", _ASKED), _WORST)
        write_report(run.report, [record])
    except OSError as error:
        raise RunFailed(
            f"{run.report} cannot be written ({error.strerror}): the run is saved at step {outcome.step}"
        ) from error


def recipe_name(args: list[str]) -> tuple[str, list[str]]:
    """The recipe that the first argument names, or the default one, and the arguments behind it."""
    if not args or args[0].startswith("-"):
        return next(iter(RECIPES)), args
    if args[0] not in RECIPES:
        raise UserError(f"no recipe {args[0]!r}{nearest(args[0], list(RECIPES))}: choose one of {', '.join(RECIPES)}")
    return args[0], args[1:]


def _place(flags: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """--out, --resume and --from, which decide what recipe the other flags are of; and those."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", nargs="?", const=True, default=False, choices=["auto"])
    parser.add_argument("--from", type=Path, dest="from_")
    parser.add_argument("--micro-batch", choices=["auto"])
    parser.add_argument("--profile")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--json", action="store_true", dest="json_")
    parser.add_argument("--wandb", nargs="?", const="jaxtrain")
    parser.add_argument("--mlflow", nargs="?", const=os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db"))
    try:
        return parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see jaxtrain train --help") from None


def _console(place: argparse.Namespace) -> Console:
    if place.quiet and place.json_:
        raise UserError("--quiet with --json: one of them")
    return QuietConsole() if place.quiet else JsonConsole() if place.json_ else Console()


def _trackers(place: argparse.Namespace) -> list[Tracker]:
    """Those that were asked for, of the run's first process. Raises `UserError` for one that is not installed."""
    asked: list[tuple[str | None, Callable[[str], Tracker]]] = [(place.wandb, WandB), (place.mlflow, MLflow)]
    found = [tracker(where) for where, tracker in asked if where is not None]
    for name in (tracker.name for tracker in found):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--{name} needs the package {name}: pip install 'jaxtrain[{name}]'")
    return found if processes.is_first() else []


def _parse(recipe: Recipe, name: str, place: argparse.Namespace, flags: list[str]) -> Train:
    # The field's type is that of the recipe at hand, so that all its fields become flags.
    kind = dataclasses.make_dataclass("Train", [("recipe", type(recipe))], bases=(Train,), frozen=True)
    kind.__doc__ = type(recipe).__doc__
    parsed: Any = parse(kind(recipe, **vars(place)), flags, f"jaxtrain train {name}")
    return parsed


def _agreed(name: str, named: str | None, where: Path) -> str:
    if named not in (None, name):
        raise UserError(f"{where} holds a run of {name}, not of {named}: leave {named} out, or choose another")
    return name


def _differences(config: dict[str, Any]) -> list[str]:
    """What besides the settings decides the bits of a run and is not so here, in words."""

    def flat(of: dict[str, Any]) -> dict[str, Any]:
        return {"python": of["python"], "devices": of["devices"], **of["versions"], **of["variables"]}

    there, here = flat(config), flat(environment())
    return [f"{k} {there.get(k)}, here {here.get(k)}" for k in {**there, **here} if there.get(k) != here.get(k)]


def _resumed(run: RunFolder, named: str | None, place: argparse.Namespace, flags: list[str]) -> tuple[str, Recipe]:
    """The run's own recipe, with what the flags change of it."""
    name, saved = read_recipe(run)
    _agreed(name, named, run.path)
    recipe = _parse(saved, name, place, flags).recipe
    for field in dataclasses.fields(recipe):
        before, after = getattr(saved, field.name), getattr(recipe, field.name)
        after = after.absolute() if isinstance(after, Path) else after  # as it was saved
        if before != after and field.name not in _MAY_CHANGE:
            raise UserError(
                f"--{field.name.replace('_', '-')} {after} differs from the run's {before}: "
                f"a resumed run may change only {', '.join(sorted(_MAY_CHANGE))}"
            )
    return name, recipe


def _fitted(recipe: Recipe, run: RunFolder, console: Console) -> Recipe:
    """`recipe` with the fastest micro-batch and rematerialisation that the device's memory has room for."""
    processes.once(lambda: check_free(run))
    memory = device_memory()
    say: Callable[[Recipe], None] = lambda candidate: console.message(f"compiling {in_words(candidate)}")  # noqa: E731
    found = plan(recipe, memory, say, precisions=[recipe.precision])
    of = f"{shown_bytes(found.chosen.peak_bytes)} of {shown_bytes(memory)}"
    console.message(f"chosen: {in_words(found.chosen.recipe)}: {of}")
    for note in notes(found):
        console.message(note)
    return found.chosen.recipe


def _trace(asked: str, run: RunFolder, recipe: Recipe) -> LoopTrace:
    begin, _, end = asked.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and 1 <= int(begin) < int(end) <= recipe.steps + 1):
        raise UserError(f"--profile {asked!r} is no range of steps 1 to {recipe.steps}: give A:B, as in 10:20")
    return LoopTrace(run.path / "profile", int(begin), int(end))


def _tell_trace(trace: LoopTrace, run: RunFolder, console: Console) -> None:
    if not trace.done:
        console.message(f"nothing is traced: the run took none of the steps {trace.steps.start} to {trace.steps[-1]}")
        return
    written = newest_trace(run.path / "profile")
    if type(console) is Console:  # neither --quiet nor --json
        tell(console.rich, time_table(written, trace.hlo), len(trace.steps))
    console.message(f"the trace: {written}")
