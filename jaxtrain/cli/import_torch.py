"""`jaxtrain import-torch CKPT`: a run of PyTorch's as a run folder, which `jaxtrain train --resume` continues."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.cli import nearest
from jaxtrain.cli.arguments import parse
from jaxtrain.data.loader import Loader
from jaxtrain.errors import UserError
from jaxtrain.interop import KINDS, TorchRun, read_torch, torch_run, write_outline
from jaxtrain.optim import Call, format_expression, parse_expression
from jaxtrain.recipes import RECIPES, Recipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import Checkpoints, check_free, preflight, schedule_call, training_step
from jaxtrain.tasks import Task, build

COMMAND = "jaxtrain import-torch CKPT --model RECIPE"


@dataclass(frozen=True)
class Import:
    """Take over a run of PyTorch's."""

    recipe: Recipe
    out: Path | None = None
    """The run's folder; runs/RECIPE by default."""
    updates: int | None = None
    """Updates made so far, where nothing in the checkpoint says."""


def main(args: list[str]) -> int:
    """Parse, read, save."""
    path, name, flags = _named(args)
    asked = _parse(RECIPES[name], name, flags)
    given = {flag.partition("=")[0] for flag in flags}
    run = RunFolder(asked.out or Path("runs") / name)
    check_free(run)
    preflight.check_settings(asked.recipe)
    task = build(asked.recipe)
    params_like, state_like = jax.eval_shape(task.init)
    if task.names is None:
        raise UserError(f"{name} has no table of PyTorch's names: choose one of {', '.join(RECIPES)}")
    theirs = torch_run(
        read_torch(path, task.names.torch_order(params_like)),
        task.names,
        params_like,
        buffers=task.buffers,
        state_like=state_like,
        kind=_kind(asked.recipe.optimizer) if "--optimizer" in given else None,
        schedule=schedule_call(asked.recipe) if "--schedule" in given else None,
        updates=asked.updates,
    )
    recipe = _parse(_recipe_of(theirs, asked.recipe, given), name, flags).recipe
    if theirs.expression is not None:
        recipe = dataclasses.replace(recipe, optimizer=format_expression(theirs.expression))
    _save(run, name, recipe, task, theirs)
    count = theirs.outline.count
    onward = "" if count < recipe.steps else f" --steps {2 * count}"
    print(f"{path} is {run.path}, after {count} updates: {recipe.optimizer}")
    print(f"continue: jaxtrain train {name} --resume --out {run.path}{onward}")
    return 0


def _save(run: RunFolder, name: str, recipe: Recipe, task: Task, theirs: TorchRun) -> None:
    """Nothing is written before all has been read."""
    preflight.check_settings(recipe)
    step = training_step(recipe, task.loss_fn)
    state = theirs.state(step, accumulate=recipe.accumulate, seed=recipe.seed)
    position = {**Loader(task.train, recipe.batch_size, recipe.seed).state(), "next_batch": theirs.outline.count}
    run.make()
    if theirs.expression is not None:
        write_outline(run.torch, theirs.outline)
    run.metrics.touch()
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.save(state, position)
    # Last: a folder with settings is a run, and this one is none without its checkpoint.
    run.write_config(name, recipe)


def _recipe_of(theirs: TorchRun, recipe: Recipe, given: set[str]) -> Recipe:
    """The recipe with what the checkpoint says of the run; its defaults are not PyTorch's."""
    found: dict[str, Any] = {}
    if theirs.expression is not None:
        # What a checkpoint does not say, a loop does not do: clipping is to be asked for.
        found["clip_norm"] = None
        if "--schedule" not in given:
            lr = theirs.outline.param_groups[0]
            found["lr"] = float(lr.get("initial_lr", lr["lr"]))
    scaler = theirs.checkpoint.scaler
    if scaler:
        names = ("growth_factor", "backoff_factor", "growth_interval")
        scale = {"init_scale": scaler["scale"], **{key: scaler[key] for key in names}}
        found |= {"precision": "fp16", "loss_scale": str(Call("dynamic_loss_scale", scale))}
    return dataclasses.replace(recipe, **found)


def _kind(written: str) -> str:
    """PyTorch's class of the optimizer that --optimizer names."""
    call = parse_expression(written)
    kinds = {kind.lower(): kind for kind in KINDS}
    if not isinstance(call, Call) or call.arguments or call.function not in kinds:
        raise UserError(f"--optimizer {written!r}: name one of {', '.join(kinds)}; its arguments are in the checkpoint")
    return kinds[call.function]


def _named(args: list[str]) -> tuple[Path, str, list[str]]:
    """The checkpoint, the recipe's name and the flags."""
    if any(a in ("-h", "--help") for a in args):
        args = ["CKPT", *args]
    if not args or args[0].startswith("-"):
        raise UserError(f"which checkpoint? {COMMAND}")
    path, flags, name = Path(args[0]), list(args[1:]), None
    for i, flag in enumerate(flags):
        if flag == "--model" or flag.startswith("--model="):
            named = flags[i : i + 2] if flag == "--model" else [flag]
            name = named[-1].removeprefix("--model=")
            del flags[i : i + len(named)]
            break
    if name is None and "CKPT" in args:
        name = next(iter(RECIPES))
    if name not in RECIPES:
        said = "which model?" if name is None else f"no recipe {name!r}{nearest(name, list(RECIPES))}:"
        raise UserError(f"{said} {COMMAND}, one of {', '.join(RECIPES)}")
    return path, name, flags


def _parse(recipe: Recipe, name: str, flags: list[str]) -> Import:
    kind = dataclasses.make_dataclass("Import", [("recipe", type(recipe))], bases=(Import,), frozen=True)
    kind.__doc__ = Import.__doc__
    parsed_flags: Any = parse(kind(recipe), flags, f"jaxtrain import-torch CKPT --model {name}")
    return parsed_flags
