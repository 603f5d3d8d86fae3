"""`jaxtrain plan RECIPE`: the settings that fit a memory, and the command to paste; with `--mesh`, what every device
has of it on that mesh and on those from 1 to 1,024 devices."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.arguments import parse
from jaxtrain.cli.compiled_programs import keep_compiled_programs
from jaxtrain.cli.scaling_tables import Scaled, as_json, columns, show
from jaxtrain.cli.train import recipe_name
from jaxtrain.cost import ceilings, device_memory, named, parsed_bandwidth, parsed_bytes, shown_bytes
from jaxtrain.distributed import sizes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.planning import (
    MOST,
    Candidate,
    Plan,
    Scaling,
    Share,
    check_size,
    grown,
    in_words,
    notes,
    plan,
    table,
    virtual_devices,
    written,
)
from jaxtrain.recipes import RECIPES, Recipe, command
from jaxtrain.runner import check_settings


@dataclass(frozen=True)
class Planned:
    """Choose micro-batch, k, remat and precision from compile-time memory analysis; nothing is allocated."""

    recipe: Recipe
    memory: str | None = None
    """What there is of it, as in 16GiB; all of the device's by default. On a mesh of each device; by default any."""
    bandwidth: str | None = None
    """Of a device's links to the others of --mesh, as in 50GB/s or 400Gbit/s."""
    device: str | None = None
    """What --mesh is of, as in H100, whose speed arithmetic is estimated by; this machine's own by default."""
    json: bool = False
    """The table as JSON, and nothing else."""


def main(args: list[str]) -> int:
    """Parse, compile, print."""
    name, flags = recipe_name(args)
    asked = _parse(RECIPES[name], name, flags)
    if asked.recipe.mesh is not None:
        return _mesh(name, asked)
    for flag in ("bandwidth", "device"):
        if getattr(asked, flag) is not None:
            raise UserError(f"--{flag} is of the devices of a mesh: say which, as in --mesh data=8")
    memory = device_memory() if asked.memory is None else parsed_bytes(asked.memory)
    keep_compiled_programs()
    console = Console(highlight=False, quiet=asked.json)
    device = jax.local_devices()[0]
    console.print(f"{name} · {device.device_kind} · {shown_bytes(memory)}", markup=False)
    with console.status("reading the data") as status:
        found = plan(asked.recipe, memory, lambda recipe: _say(console, status, f"compiling {in_words(recipe)}"))
    told = {"recipe": name, "device": device.device_kind, "memory_bytes": memory}
    if asked.json:
        _write_json({**told, "rows": list(table(found)), "command": command("train", name, found.chosen.recipe)})
    _show_plan(console, name, found)
    return 0


def _parse(recipe: Recipe, name: str, flags: list[str]) -> Planned:
    kind = dataclasses.make_dataclass("Planned", [("recipe", type(recipe))], bases=(Planned,), frozen=True)
    kind.__doc__ = Planned.__doc__
    parsed: Any = parse(kind(recipe), flags, f"jaxtrain plan {name}")
    return parsed


def _say(console: Console, status: Any, text: str) -> None:
    if console.is_terminal:
        status.update(text)
    else:
        console.print(f"{text} …", markup=False)


def _write_json(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told, indent=2) + "\n")


def _show_plan(console: Console, name: str, found: Plan) -> None:
    console.print(_table(found))
    for note in notes(found):
        console.print(note, markup=False, soft_wrap=True)
    console.print(command("train", name, found.chosen.recipe), markup=False, soft_wrap=True)


def _table(found: Plan) -> Table:
    headings = ("micro-batch", "k", "remat", "precision", "peak memory", "GFLOP a step", "time")
    shown = columns(headings, left=("remat", "precision"))
    for candidate, row in zip(found.candidates, table(found), strict=True):
        style = "bold green" if row["chosen"] else "" if row["fits"] else "dim"
        mark = "→" if row["chosen"] else " " if row["fits"] else "✗"
        shown.add_row(*map(Text, (mark, *_cells(candidate, row))), style=style)
    return shown


def _cells(candidate: Candidate, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["micro_batch"]),
        str(row["accumulate"]),
        row["remat"],
        row["precision"],
        shown_bytes(candidate.peak_bytes),
        f"{candidate.flops / 1e9:.3g}",
        f"{row['relative_time']:.2f}×",
    )


def _mesh(name: str, asked: Planned) -> int:
    """Of a recipe that says its mesh. Raises `RunFailed`, after all is told, where nothing fits on it."""
    recipe, spec = asked.recipe, str(asked.recipe.mesh)
    check_size(spec)
    memory = None if asked.memory is None else parsed_bytes(asked.memory)
    bandwidth = None if asked.bandwidth is None else parsed_bandwidth(asked.bandwidth)
    known = None if asked.device is None else named(asked.device)
    console = Console(highlight=False, quiet=asked.json)
    console.print(f"{name} · {spec}{f' · {shown_bytes(memory)} a device' if memory else ''}", markup=False)
    found = failed = None
    with console.status("making virtual devices") as status:
        say = partial(_say, console, status)
        devices = virtual_devices(MOST)
        check_settings(recipe)  # which may ask for a device
        if memory is not None:
            try:
                found = _fitting(recipe, memory, devices, say)
                recipe = found.chosen.recipe
            except RunFailed as error:
                failed = error
        own = jax.local_devices()[0]
        device, limits = known or (own.device_kind, ceilings(own))
        scaled = _scaled(Scaling(recipe, devices, limits), spec, say)
    scaled = dataclasses.replace(scaled, device=device, memory=memory, bandwidth=bandwidth)
    if asked.json:
        _write_json({"recipe": name, **as_json(scaled), "command": command("train", name, recipe)})
    if found is not None:
        _show_plan(console, name, found)
    show(console, scaled)
    if failed is not None:
        raise failed
    return 0


def _fitting(recipe: Recipe, memory: int, devices: Sequence[Any], say: Callable[[str], None]) -> Plan:
    """The settings for the mesh: of the machine's own devices, where they are as many."""
    own = jax.device_count() == math.prod(sizes(str(recipe.mesh)).values())
    return plan(recipe, memory, lambda recipe: say(f"compiling {in_words(recipe)}"), devices=None if own else devices)


def _scaled(scaling: Scaling, spec: str, say: Callable[[str], None]) -> Scaled:
    """On the mesh, and on all on the way through it up to the first that cannot be."""
    say(f"compiling for {spec}")
    own = scaling.share(sizes(spec))
    shares: list[Share] = []
    meshes = grown(spec, MOST)
    for i, shape in enumerate(meshes):
        say(f"compiling for {written(shape)}, {i + 1} of {len(meshes)}")
        try:
            shares.append(scaling.share(shape))
        except UserError as error:
            return Scaled(spec, own, shares, f"{written(shape)} and larger: {error}")
    return Scaled(spec, own, shares, None)
