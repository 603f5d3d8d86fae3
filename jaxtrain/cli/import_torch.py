"""`jaxtrain import-torch CKPT`: write a PyTorch checkpoint as a run folder for `jaxtrain train --resume`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxtrain.cli.named_recipe import check_recipe_name
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse_both, parse_known
from jaxtrain.interop import OPTIMIZER_CLASSES, TorchRun, read_torch, torch_run, write_metadata
from jaxtrain.optim import Call, format_expression, parse_expression
from jaxtrain.recipes import RECIPES, named_recipe
from jaxtrain.run import Recipe, Task, task_batches
from jaxtrain.run_folder import RunFolder, default_folder
from jaxtrain.runner import Checkpoints, check_free, preflight, saved_settings, schedule_call, training_step

COMMAND = "jaxtrain import-torch CKPT --model RECIPE"


@dataclass(frozen=True)
class Import:
    """Continue a PyTorch run."""

    model: Annotated[str | None, Flag(metavar="RECIPE")] = None
    """The recipe whose model the checkpoint holds."""
    out: Path | None = None
    """The run's folder; runs/RECIPE by default."""
    updates: int | None = None
    """Number of updates made so far, if the checkpoint does not contain it."""


def main(args: list[str]) -> int:
    """Parse, read, save."""
    path, name, options, recipe, explicit = _parse(args)
    run = RunFolder(options.out) if options.out else default_folder(name)
    check_free(run)
    preflight.check_settings(recipe)
    task = recipe.task()
    params_like, state_like = task.shapes()
    if task.names is None:
        raise UserError(
            f"{name} has no table of PyTorch parameter names: define Task.names, or choose one of {', '.join(RECIPES)}"
        )
    theirs = torch_run(
        read_torch(path, task.names.torch_order(params_like)),
        task.names,
        params_like,
        buffers=task.buffers,
        state_like=state_like,
        kind=_kind(recipe.optimizer) if "optimizer" in explicit else None,
        schedule=schedule_call(recipe) if "schedule" in explicit else None,
        updates=options.updates,
    )
    settings = _settings(theirs)
    if "schedule" in explicit:
        settings.pop("lr", None)
    recipe = dataclasses.replace(recipe, **{field: value for field, value in settings.items() if field not in explicit})
    if theirs.expression is not None:
        recipe = dataclasses.replace(recipe, optimizer=format_expression(theirs.expression))
    _save(run, name, recipe, task, theirs)
    count = theirs.metadata.count
    steps = "" if count < recipe.steps else f" --steps {2 * count}"
    print(f"imported {path} into {run.path} after {count} updates: {recipe.optimizer}")
    print(f"continue: jaxtrain train {name} --resume --out {run.path}{steps}")
    return 0


def _parse(args: list[str]) -> tuple[Path, str, Import, Recipe, set[str]]:
    """Return the checkpoint, the recipe's name, the options, the recipe, and the fields set on the command line."""
    asks_help = any(a in ("-h", "--help") for a in args)
    if asks_help:
        args = ["CKPT", *args]
    if not args or args[0].startswith("-"):
        raise UserError(f"a checkpoint is required: {COMMAND}")
    path, flags = Path(args[0]), args[1:]
    options, rest = parse_known(Import(), flags, "jaxtrain import-torch CKPT")
    name = options.model or (next(iter(RECIPES)) if asks_help else None)
    if name is None:
        raise UserError(f"--model is required: {COMMAND}, one of {', '.join(RECIPES)}, or FILE.py::NAME")
    name = check_recipe_name(name)
    prog = f"jaxtrain import-torch CKPT --model {name}"
    _, recipe = parse_both(options, named_recipe(name), rest, prog, Import.__doc__)
    explicit = {flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in rest if flag.startswith("--")}
    return path, name, options, recipe, explicit


def _save(run: RunFolder, name: str, recipe: Recipe, task: Task, theirs: TorchRun) -> None:
    """Write the run folder. Called once everything is read, so that a failed import leaves nothing behind."""
    preflight.check_settings(recipe)
    step = training_step(recipe, task)
    state = theirs.state(step, accumulate=recipe.accumulate, seed=recipe.seed)
    position = {**task_batches(task, recipe).state(), "next_batch": theirs.metadata.count}
    run.make()
    if theirs.expression is not None:
        write_metadata(run.torch, theirs.metadata)
    run.metrics.touch()
    with Checkpoints(run.checkpoints, constant=saved_settings(recipe, task)) as checkpoints:
        checkpoints.save(state, position)
    # Last: a folder with a config is a run, and it is not one without its checkpoint.
    run.write_config(name, recipe)


def _settings(theirs: TorchRun) -> dict[str, Any]:
    """Return the recipe's fields that the checkpoint determines; their defaults differ from PyTorch's."""
    settings: dict[str, Any] = {}
    if theirs.expression is not None:
        # A PyTorch loop does not clip unless it is written to, and no checkpoint records it.
        settings["clip_norm"] = None
        group = theirs.metadata.param_groups[0]
        settings["lr"] = float(group.get("initial_lr", group["lr"]))
    scaler = theirs.checkpoint.scaler
    if scaler:
        names = ("growth_factor", "backoff_factor", "growth_interval")
        scale = {"init_scale": scaler["scale"], **{key: scaler[key] for key in names}}
        settings |= {"precision": "fp16", "loss_scale": str(Call("dynamic_loss_scale", scale))}
    return settings


def _kind(written: str) -> str:
    """Return PyTorch's class of the optimizer that --optimizer names."""
    call = parse_expression(written)
    kinds = {kind.lower(): kind for kind in OPTIMIZER_CLASSES}
    if not isinstance(call, Call) or call.arguments or call.function not in kinds:
        raise UserError(
            f"--optimizer must be one of {', '.join(kinds)} without arguments, got {written!r}: "
            "the checkpoint holds its arguments"
        )
    return kinds[call.function]
