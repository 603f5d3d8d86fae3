"""`jaxtrain train`: train a recipe into a run folder."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jaxtrain
from jaxtrain.cli import nearest
from jaxtrain.cli.arguments import parse
from jaxtrain.errors import UserError
from jaxtrain.observe import Console, write_report
from jaxtrain.observe.metrics import read_metrics
from jaxtrain.recipes import RECIPES, LanguageRecipe, Recipe
from jaxtrain.runner import RunFolder, fit

# Of a resumed run these may change; any other change would make it another run.
_MAY_CHANGE = {"steps", "log_every", "eval_every", "save_every", "max_skips", "allow_recompile"}


@dataclass(frozen=True)
class Train:
    """Train a recipe."""

    recipe: Recipe
    out: Path | None = None
    """The run's folder; runs/RECIPE by default."""
    resume: bool = False
    """Continue the run in the folder from its newest checkpoint."""


def main(args: list[str]) -> int:
    """Parse, train, report."""
    name, flags = _recipe_name(args)
    asked = _parse(RECIPES[name], name, flags)
    run = RunFolder(asked.out or Path("runs") / name)
    if asked.resume:
        name, recipe = _resumed(run, name if args[:1] == [name] else None, flags)
    else:
        recipe = asked.recipe
    console = Console()
    device = jax.devices()[0]
    console.message(
        f"jaxtrain {jaxtrain.__version__} · {name} · {jax.device_count()} {device.device_kind} · {run.path} · "
        f"compiled programs are kept in {_keep_compiled_programs()}"
    )
    outcome = fit(name, recipe, run, resume=asked.resume, console=console)
    metrics, config = read_metrics(run.metrics), json.loads(run.config.read_text())
    write_report(run.report, metrics, config, outcome.references, outcome.sample)
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


def _parse(recipe: Recipe, name: str, flags: list[str]) -> Train:
    # The field's type is that of the recipe at hand, so that all its fields become flags.
    kind = dataclasses.make_dataclass("Train", [("recipe", type(recipe))], bases=(Train,), frozen=True)
    kind.__doc__ = type(recipe).__doc__
    parsed: Any = parse(kind(recipe), flags, f"jaxtrain train {name}")
    return parsed


def _resumed(run: RunFolder, named: str | None, flags: list[str]) -> tuple[str, Recipe]:
    """The run's own recipe, with what the flags change of it."""
    name, saved = run.read_recipe()
    if named not in (None, name):
        raise UserError(f"{run.path} holds a run of {name}, not of {named}: choose its --out")
    recipe = _parse(saved, name, flags).recipe
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
