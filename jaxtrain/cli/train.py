"""`jaxtrain train`: train a recipe into a run folder."""

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

import jaxtrain
from jaxtrain.cli import nearest
from jaxtrain.cli.arguments import parse
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe import Console, write_report
from jaxtrain.observe.metrics import read_metrics
from jaxtrain.recipes import RECIPES, LanguageRecipe, Recipe
from jaxtrain.runner import RunFolder, fit
from jaxtrain.runner.run_folder import environment, read_recipe

# Of a resumed run these may change; any other change would make it another run.
_MAY_CHANGE = {
    *("steps", "log_every", "eval_every", "save_every", "keep_last", "keep_best", "keep_every"),
    *("max_skips", "spike_factor", "on_spike", "stall_seconds", "allow_recompile"),
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


def main(args: list[str]) -> int:
    """Parse, train, report."""
    name, flags = _recipe_name(args)
    named = name if args[:1] == [name] else None
    place, flags = _place(flags)
    if place.from_:
        name = _agreed(read_recipe(place.from_)[0], named, place.from_)
    run = RunFolder(place.out or Path("runs") / name)
    if place.resume is True or (place.resume and run.config.exists()):
        name, recipe = _resumed(run, named, place, flags)
    else:
        base = read_recipe(place.from_)[1] if place.from_ else RECIPES[name]
        recipe = _parse(base, name, place, flags).recipe
    console = Console()
    device = jax.devices()[0]
    console.message(
        f"jaxtrain {jaxtrain.__version__} · {name} · {jax.device_count()} {device.device_kind} · {run.path} · "
        f"compiled programs are kept in {_keep_compiled_programs()}"
    )
    if place.from_:
        for difference in _differences(json.loads(place.from_.read_text())):
            console.message(f"{place.from_} was made with {difference}: the bits may differ")
    outcome = fit(name, recipe, run, resume=place.resume, console=console)
    metrics, config = read_metrics(run.metrics), json.loads(run.config.read_text())
    try:
        write_report(run.report, metrics, config, outcome.references, outcome.sample)
    except OSError as error:
        raise RunFailed(
            f"{run.report} cannot be written ({error.strerror}): the run is saved at step {outcome.step}"
        ) from error
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
    if outcome.exit_status:
        console.message(f"stopped and saved at step {outcome.step}: jaxtrain train {name} --resume --out {run.path}")
    return outcome.exit_status


def _recipe_name(args: list[str]) -> tuple[str, list[str]]:
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
    try:
        return parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see jaxtrain train --help") from None


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
    name, saved = run.read_recipe()
    _agreed(name, named, run.path)
    recipe = _parse(saved, name, place, flags).recipe
    for field in dataclasses.fields(recipe):
        before, after = getattr(saved, field.name), getattr(recipe, field.name)
        if before != after and field.name not in _MAY_CHANGE:
            raise UserError(
                f"--{field.name.replace('_', '-')} {after} differs from the run's {before}: "
                f"a resumed run may change only {', '.join(sorted(_MAY_CHANGE))}"
            )
    return name, recipe


def _keep_compiled_programs() -> Path:
    """Let XLA keep what it compiles from one run to the next, and say where."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(cache) / "jaxtrain" / "xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder
