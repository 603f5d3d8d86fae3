"""`jaxtrain plan RECIPE`: find settings that fit in memory and print the command for them.

With `--mesh` it computes memory and communication per device on that mesh and on meshes from 1 to 1,024 devices, with
`--device` (and no `--bandwidth`) the costs of the programs of a GPU, which need not be here, and with `--nodes` how
they scale over nodes of such GPUs.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.compilation_cache import enable_compilation_cache
from jaxtrain.cli.named_recipe import recipe_name
from jaxtrain.cli.plans.plan_gpu import plan_for_gpu
from jaxtrain.cli.plans.plan_nodes import Nodes, plan_for_nodes
from jaxtrain.cli.plans.scaling_tables import ScalingTables, columns
from jaxtrain.cli.plans.state_table import state_table
from jaxtrain.cli.progress_line import show_progress
from jaxtrain.cost import ceilings, device_memory, find_gpu, format_bytes, parse_bandwidth, parse_bytes
from jaxtrain.distributed import parse_mesh, sequence_parallel_size
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.flags import parse_both
from jaxtrain.planning import (
    MAX_DEVICES,
    Candidate,
    Context,
    DeviceShare,
    Plan,
    Scaling,
    candidate_rows,
    check_mesh_size,
    choice_notes,
    doubled_meshes,
    format_mesh,
    format_settings,
    gathered_params_json,
    plan,
    virtual_devices,
)
from jaxtrain.recipes import command, named_recipe
from jaxtrain.run import Recipe
from jaxtrain.runner import check_settings


@dataclass(frozen=True)
class PlanOptions:
    """Choose micro-batch size, k, remat and precision by compile-time memory analysis, without allocating anything."""

    memory: str | None = None
    """Available memory, such as 16GiB; the device's by default. With --mesh: per device, unlimited by default."""
    bandwidth: str | None = None
    """Bandwidth between the devices of --mesh, such as 50GB/s or 400Gbit/s."""
    device: str | None = None
    """GPU to compile for, which need not be here: h100, h200 or a100. With --bandwidth: device type for estimates."""
    nodes: int | None = None
    """Number of nodes with GPUs of --device: how the run scales up to 16,384 GPUs, and, without --mesh, which mesh to
    choose. --bandwidth is then that of a GPU between nodes."""
    picture: Path | None = None
    """With --nodes: path of an SVG to draw the scaling in."""
    json: bool = False
    """Print the table as JSON and nothing else."""


def main(args: list[str]) -> int:
    """Parse, compile, print."""
    name, flags = recipe_name(args)
    options, recipe = parse_both(PlanOptions(), named_recipe(name), flags, f"jaxtrain plan {name}", PlanOptions.__doc__)
    if options.nodes is not None:
        where = Nodes(options.nodes, options.device, options.bandwidth, options.memory)
        return plan_for_nodes(name, recipe, where, options.picture, options.json)
    if options.picture is not None:
        raise UserError("--picture requires --nodes: add a number of nodes, such as --nodes 8")
    if options.device is not None and options.bandwidth is None:
        return plan_for_gpu(name, recipe, options.device, options.memory, options.json)
    if recipe.mesh is not None:
        return _plan_mesh(name, recipe, options)
    if options.bandwidth is not None:
        raise UserError("--bandwidth requires --mesh: add one, such as --mesh data=8")
    memory = device_memory() if options.memory is None else parse_bytes(options.memory)
    enable_compilation_cache()
    console = Console(highlight=False, quiet=options.json)
    device = jax.local_devices()[0]
    console.print(f"{name} · {device.device_kind} · {format_bytes(memory)}", markup=False)
    with console.status("reading the data") as status:
        found = plan(
            recipe, memory, lambda candidate: show_progress(console, status, f"compiling {format_settings(candidate)}")
        )
    context = {"recipe": name, "device": device.device_kind, "memory_bytes": memory}
    if options.json:
        _write_json(
            {
                **context,
                "rows": list(candidate_rows(found)),
                "state": [part._asdict() for part in found.state],
                "gradient_sums": found.sums.as_json(found.chosen.recipe),
                "gathered_params": gathered_params_json(found.chosen.recipe, found.gathered_bytes),
                "fp8": found.fp8 or None,
                "command": command("train", name, found.chosen.recipe),
            }
        )
    _show_plan(console, name, found)
    return 0


def _write_json(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def _show_plan(console: Console, name: str, found: Plan) -> None:
    console.print(_table(found))
    console.print(state_table(found.state))
    for note in choice_notes(found):
        console.print(note, markup=False, soft_wrap=True)
    console.print(command("train", name, found.chosen.recipe), markup=False, soft_wrap=True)


def _table(found: Plan) -> Table:
    headings = ("micro-batch", "k", "remat", "precision", "peak memory", "GFLOP/step", "time")
    rendered = columns(headings, left=("remat", "precision"))
    for column in rendered.columns:
        column.no_wrap = column.header in ("remat", "precision")  # values of flags: a narrow table breaks headings
    for candidate, row in zip(found.candidates, candidate_rows(found), strict=True):
        style = "bold green" if row["chosen"] else "" if row["fits"] else "dim"
        mark = "→" if row["chosen"] else " " if row["fits"] else "✗"
        rendered.add_row(*map(Text, (mark, *_cells(candidate, row))), style=style)
    return rendered


def _cells(candidate: Candidate, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["micro_batch"]),
        str(row["accumulate"]),
        row["remat"],
        row["precision"],
        format_bytes(candidate.peak_bytes),
        f"{candidate.flops / 1e9:.3g}",
        f"{row['relative_time']:.2f}×",
    )


def _plan_mesh(name: str, recipe: Recipe, options: PlanOptions) -> int:
    """Plan a recipe with a mesh. Raises `RunFailed`, after printing the tables, if nothing fits on it."""
    spec = str(recipe.mesh)
    check_mesh_size(spec)
    memory = None if options.memory is None else parse_bytes(options.memory)
    bandwidth = None if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    known = None if options.device is None else find_gpu(options.device)
    console = Console(highlight=False, quiet=options.json)
    console.print(f"{name} · {spec}{f' · {format_bytes(memory)} per device' if memory else ''}", markup=False)
    found = failed = None
    with console.status("creating virtual devices") as status:
        report = partial(show_progress, console, status)
        devices = virtual_devices(MAX_DEVICES)
        check_settings(recipe)  # only now: it may initialize the devices
        if memory is not None:
            try:
                found = _fitting(recipe, memory, devices, report)
                recipe = found.chosen.recipe
            except RunFailed as error:
                failed = error
        own = jax.local_devices()[0]
        device, limits = known or (own.device_kind, ceilings(own))
        scaling = Scaling(recipe, devices, limits)
        tables, contexts = _scaling_tables(scaling, spec, report), _contexts(scaling, recipe, memory, report)
    tables = dataclasses.replace(tables, contexts=contexts, device=device, memory=memory, bandwidth=bandwidth)
    if options.json:
        _write_json({"recipe": name, **tables.as_json(), "command": command("train", name, recipe)})
    if found is not None:
        _show_plan(console, name, found)
    tables.print(console)
    if failed is not None:
        raise failed
    return 0


def _fitting(recipe: Recipe, memory: int, devices: Sequence[Any], report: Callable[[str], None]) -> Plan:
    """Return the plan for the mesh, compiled for the machine's own devices if their number matches."""
    own = jax.device_count() == math.prod(parse_mesh(str(recipe.mesh)).values())
    return plan(
        recipe,
        memory,
        lambda candidate: report(f"compiling {format_settings(candidate)}"),
        devices=None if own else devices,
    )


def _contexts(scaling: Scaling, recipe: Recipe, memory: int | None, report: Callable[[str], None]) -> Sequence[Context]:
    """Return the memory of a device by context length, if the mesh divides sequences."""
    shape = parse_mesh(str(recipe.mesh))
    if sequence_parallel_size(shape) == 1 or not hasattr(recipe, "seq_len"):
        return ()
    report("compiling for longer contexts")
    return [*scaling.contexts(shape, memory)]


def _scaling_tables(scaling: Scaling, spec: str, report: Callable[[str], None]) -> ScalingTables:
    """Compute the tables for the mesh and for its doublings, up to the first one that is not possible."""
    report(f"compiling for {spec}")
    own = scaling.share(parse_mesh(spec))
    shares: list[DeviceShare] = []
    meshes = doubled_meshes(spec, MAX_DEVICES)
    for i, shape in enumerate(meshes):
        report(f"compiling for {format_mesh(shape)}, {i + 1} of {len(meshes)}")
        try:
            shares.append(scaling.share(shape))
        except UserError as error:
            return ScalingTables(spec, own, shares, f"{format_mesh(shape)} and larger: {error}")
    return ScalingTables(spec, own, shares, None)
