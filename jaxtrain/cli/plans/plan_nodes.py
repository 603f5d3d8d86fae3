"""`jaxtrain plan RECIPE --device h100 --nodes N [--mesh …]`: how a run scales over nodes of absent GPUs.

The costs are those of programs compiled for up to 512 GPUs, extrapolated to 16,384 (`jaxtrain.planning.scale.growth`).
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.plans.plan_gpu import available_memory, describe_memory
from jaxtrain.cli.plans.scaling_picture import draw_growths
from jaxtrain.cli.plans.scaling_tables import columns
from jaxtrain.cli.progress_line import show_progress
from jaxtrain.cost import GpuTarget, find_target, gpu_devices, parse_bandwidth, utilization_note
from jaxtrain.distributed import parse_mesh
from jaxtrain.errors import UserError
from jaxtrain.fields import brief
from jaxtrain.observe import format_count
from jaxtrain.planning import (
    MOST_GPUS,
    Growth,
    MeshChoice,
    MeshCost,
    MeshCosts,
    Settings,
    choose_mesh,
    fitting_cost,
    format_mesh,
    growths,
)
from jaxtrain.recipes import command
from jaxtrain.run import Recipe
from jaxtrain.runner import check_settings


@dataclass(frozen=True)
class Nodes:
    """The flags that describe the GPUs: their number of nodes, type, bandwidth between nodes and memory."""

    count: int
    device: str | None
    bandwidth: str | None
    memory: str | None

    def target(self) -> GpuTarget:
        """Return the GPU.

        Raises:
          UserError: It is unknown, or there are too few or too many nodes of it.
        """
        if self.device is None:
            raise UserError("--nodes requires --device: add a GPU, such as --device h100")
        target = find_target(self.device)
        most = MOST_GPUS // target.gpus_per_node
        if not 1 <= self.count <= most:
            raise UserError(
                f"--nodes must be from 1 to {most:,} nodes of {target.gpus_per_node} GPUs, got {self.count:,}"
            )
        if self.bandwidth is None:
            return target
        return dataclasses.replace(target, network_bandwidth=parse_bandwidth(self.bandwidth))


def plan_for_nodes(name: str, recipe: Recipe, nodes: Nodes, picture: Path | None, as_json: bool) -> int:
    """Plan a recipe for nodes of GPUs, and print how it scales.

    Args:
      name: Name of the recipe.
      recipe: The recipe; its batch is that of all nodes together.
      nodes: The GPUs.
      picture: Path of an SVG to write; None for none.
      as_json: Whether to print JSON and nothing else.

    Raises:
      UserError: The flags are wrong, or the plugin that compiles for the GPU is missing.
      RunFailed: Nothing fits.
    """
    target = nodes.target()
    gpus = nodes.count * target.gpus_per_node
    _check(recipe, gpus, nodes, picture)
    # The plugin would look for a driver; nothing of this command runs on a GPU.
    jax.config.update("jax_platforms", "cpu")
    gpu_devices(target, target.gpus_per_node)  # fails if the plugin is missing
    available, begin = available_memory(target, nodes.memory), time.perf_counter()
    console = Console(highlight=False, quiet=as_json)
    of_nodes = f"{nodes.count:,} node{'s' * (nodes.count > 1)} of {target.gpus_per_node} {target.name}"
    memory = describe_memory(available, target, nodes.memory)
    console.print(f"{name} · {of_nodes} · {memory}", markup=False, soft_wrap=True)
    with console.status("reading the data") as status:
        costs = MeshCosts(recipe, target, lambda candidate: show_progress(console, status, _compiling(candidate)))
        choice = _choose(costs, recipe, gpus, available)
        own = choice.chosen
        settings = Settings(own.rows, own.accumulate, own.remat, own.gradient_sums)
        found = list(growths(costs, own.mesh, settings))
    seconds = time.perf_counter() - begin
    chosen: dict[str, Any] = {x: getattr(own, x) for x in ("accumulate", "remat", "gradient_sums")}
    run = dataclasses.replace(recipe, mesh=format_mesh(own.mesh), **chosen)
    if picture is not None:
        _write(picture, draw_growths(f"{name} on {target.name}", found, own, costs.task.unit))
    if as_json:
        values = _as_json(name, target, nodes, choice, found)
        sys.stdout.write(
            json.dumps({**values, "plan_s": seconds, "command": command("train", name, run)}, indent=2) + "\n"
        )
        return 0
    console.print("memory, and bytes sent in a step over NVLink and over the network (net), in GiB per GPU")
    if (note := utilization_note(recipe.precision)) is not None:
        console.print(note, markup=False, soft_wrap=True)
    console.print(_table(choice.costs, choice, costs.task.unit))
    for rejected in choice.rejected:
        console.print(f"{format_mesh(rejected.mesh)}: {rejected.why}", markup=False, soft_wrap=True)
    for growth in found:
        _print_growth(console, growth, choice, costs.task.unit)
    console.print(_summary(own, costs.task.unit, seconds, len(choice.costs)), markup=False, soft_wrap=True)
    console.print(command("train", name, run), markup=False, soft_wrap=True)
    return 0


def _check(recipe: Recipe, gpus: int, nodes: Nodes, picture: Path | None) -> None:
    check_settings(recipe)
    if recipe.mesh is not None and (product := math.prod(parse_mesh(recipe.mesh).values())) != gpus:
        raise UserError(
            f"mesh {brief(recipe.mesh)} has {product:,} GPUs and {nodes.count:,} nodes have {gpus:,}: make its sizes "
            f"multiply to {gpus:,}, or leave out --mesh to choose one"
        )
    if picture is not None and picture.suffix != ".svg":
        raise UserError(f"--picture {brief(str(picture))} is not an SVG: use a name that ends in .svg")
    if picture is not None and not picture.parent.is_dir():
        raise UserError(f"the folder of --picture {brief(str(picture))} does not exist: create it")


def _choose(costs: MeshCosts, recipe: Recipe, gpus: int, memory: int) -> MeshChoice:
    """Return the recipe's own mesh, or the fastest one."""
    if recipe.mesh is None:
        return choose_mesh(costs, recipe, gpus, memory)
    mesh = parse_mesh(recipe.mesh)
    cost = fitting_cost(costs, mesh, recipe, memory)
    return MeshChoice(memory, cost, [cost], [])


def _compiling(recipe: Recipe) -> str:
    rows = f"{recipe.batch_size:,} rows" + (f" in {recipe.accumulate} micro-batches" if recipe.accumulate > 1 else "")
    return f"compiling {recipe.mesh}, {rows}, remat {recipe.remat}"


def _as_json(name: str, target: GpuTarget, nodes: Nodes, choice: MeshChoice, found: Sequence[Growth]) -> dict[str, Any]:
    def cost(x: MeshCost) -> dict[str, Any]:
        return {**x.as_json(), "fits": x.peak_bytes <= choice.memory}

    links = target.links
    return {
        "recipe": name,
        "device": target.name,
        "nodes": nodes.count,
        "gpus_per_node": target.gpus_per_node,
        "nvlink_bytes_per_s": links.nvlink,
        "network_bytes_per_s": links.network,
        "memory_bytes": choice.memory,
        "chosen": cost(choice.chosen),
        "candidates": [cost(x) for x in choice.costs],
        "rejected": [{"mesh": format_mesh(x.mesh), "why": x.why} for x in choice.rejected],
        "growth": [
            {
                "axis": x.axis,
                "scaling": x.scaling,
                "rows": [cost(c) for c in x.costs],
                "ends": x.ends,
                "verdict": x.verdict,
            }
            for x in found
        ],
    }


_HEADINGS = ("GPUs", "mesh", "rows", "memory", "NVLink", "net", "step", "waits", "MFU")


def _table(costs: Sequence[MeshCost], choice: MeshChoice, unit: str) -> Table:
    table = columns((*_HEADINGS, f"{unit}/s"), left=("mesh",))
    for column in table.columns:
        column.no_wrap = column.header != "mesh"
        column.overflow = "fold"
        if column.header == "mesh":  # no axis is broken
            column.min_width = max((len(part) for x in costs for part in format_mesh(x.mesh).split(",")), default=0)
    table.padding, table.show_edge, table.pad_edge = (0, 1, 0, 0), False, False
    for cost in costs:
        own, fits = cost.mesh == choice.chosen.mesh, cost.peak_bytes <= choice.memory
        mark = "✗" if not fits else "→" if own else "~" if dict(cost.program) != dict(cost.mesh) else " "
        cells = (
            f"{cost.gpus:,}",
            format_mesh(cost.mesh).replace(",", "\n"),
            f"{cost.rows}×{cost.accumulate}" if cost.accumulate > 1 else str(cost.rows),
            *(
                f"{size / 2**30:.{3 if size >= 2**30 else 2}g}"
                for size in (cost.peak_bytes, cost.nvlink_bytes, cost.network_bytes)
            ),
            f"{cost.seconds:.3g} s" if cost.seconds >= 0.1 else f"{1e3 * cost.seconds:.3g} ms",
            f"{cost.exposed_share:.1%}",
            f"{cost.mfu:.0%}",
            format_count(cost.units_per_s),
        )
        style = "dim" if not fits else "bold green" if own else ""
        table.add_row(*map(Text, (mark, *cells)), style=style)
    return table


def _print_growth(console: Console, growth: Growth, choice: MeshChoice, unit: str) -> None:
    if growth.costs:
        console.print(f"{growth.axis} grows, {growth.fixed} fixed ({growth.scaling} scaling)", markup=False)
        console.print(_table(growth.costs, choice, unit))
    console.print(growth.verdict, markup=False, soft_wrap=True)


def _summary(own: MeshCost, unit: str, seconds: float, candidates: int) -> str:
    compared = f"chosen of {candidates} meshes; " if candidates > 1 else ""
    return (
        f"{format_mesh(own.mesh)}: {compared}a step of {own.seconds:.3g} s, {own.exposed_share:.1%} of it waiting for "
        f"communication, remat {own.remat}, {format_count(own.units_per_s)} {unit}/s, MFU {own.mfu:.0%}; ~ is "
        f"extrapolated from a program for fewer GPUs; planned in {seconds:.0f} s"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--picture {brief(str(path))} cannot be written ({error.strerror}): use another path"
        ) from None
