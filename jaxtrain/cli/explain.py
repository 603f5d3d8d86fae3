"""`jaxtrain explain RECIPE`: what is done to the program of a run's training step, why, and what it gains."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.cli.named_recipe import recipe_name
from jaxtrain.cost import find_target, gpu_devices
from jaxtrain.distributed import make_mesh, parse_mesh, shard
from jaxtrain.flags import parse_both
from jaxtrain.passes.pipeline import PREDICTED_FOR
from jaxtrain.planning import virtual_devices
from jaxtrain.recipes import named_recipe
from jaxtrain.run import Recipe
from jaxtrain.runner import check_settings, training_step
from jaxtrain.step import Phase, explained


@dataclass(frozen=True)
class ExplainOptions:
    """Print the passes that the program of a training step goes through, in their order: nothing is trained."""

    device: str | None = None
    """GPU that the program is for, which need not be here: h100, h200 or a100. By default the device of a run."""
    json: bool = False
    """Print the passes as JSON and nothing else."""


def main(args: list[str]) -> int:
    """Parse and print."""
    name, flags = recipe_name(args)
    usage = f"jaxtrain explain {name}"
    options, recipe = parse_both(ExplainOptions(), named_recipe(name), flags, usage, ExplainOptions.__doc__)
    phases = passes_of(recipe, options.device)
    if options.json:
        sys.stdout.write(json.dumps([_values(phase) for phase in phases], indent=2) + "\n")
        return 0
    device = options.device or jax.default_backend()
    settings = [name, recipe.precision, device, *([recipe.mesh] if recipe.mesh else [])]
    console = Console(highlight=False)
    console.print(" · ".join(settings), markup=False)
    for phase in phases:
        if phase.passes:
            console.print()
            console.print(_table(phase))
    if any("predicted" in x.gain for phase in phases for x in phase.passes):
        console.print(f"\npredicted: of {PREDICTED_FOR}", markup=False)
    return 0


def passes_of(recipe: Recipe, device: str | None) -> tuple[Phase, ...]:
    """Return the passes of a recipe's training step.

    Args:
      recipe: The recipe.
      device: Name of the GPU that it is compiled for; None for the device of a run.

    Raises:
      UserError: The settings are invalid, or the GPU is unknown.
    """
    check_settings(recipe)
    count = 1 if recipe.mesh is None else math.prod(parse_mesh(recipe.mesh).values())
    target = None if device is None else find_target(device)
    if target is not None:
        jax.config.update("jax_platforms", "cpu")
    task = recipe.task()
    step = training_step(recipe, task)
    if recipe.mesh is not None:
        devices = virtual_devices(count) if target is None else gpu_devices(target, count)
        step = shard(step, make_mesh(recipe.mesh, devices), task.sharding)
    elif target is not None:
        step = step.for_platform("gpu")
    return explained(step.parts)


def _table(phase: Phase) -> Table:
    table = Table(title=phase.program, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("pass", "what it does", "why", "gain"):
        table.add_column(column)
    for x in phase.passes:
        table.add_row(x.name, x.does, x.why, x.gain or "–")
    return table


def _values(phase: Phase) -> dict[str, Any]:
    return {"program": phase.program, "passes": [asdict(x) for x in phase.passes]}
