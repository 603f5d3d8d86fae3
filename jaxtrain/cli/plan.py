"""`jaxtrain plan RECIPE`: the settings that fit a memory, and the command to paste."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.arguments import parse
from jaxtrain.cli.compiled_programs import keep_compiled_programs
from jaxtrain.cli.train import recipe_name
from jaxtrain.memory import device_memory, parsed_bytes, shown_bytes
from jaxtrain.plan import Candidate, Plan, in_words, notes, plan, table
from jaxtrain.recipes import RECIPES, Recipe
from jaxtrain.recipes.command import command


@dataclass(frozen=True)
class Planned:
    """Choose micro-batch, k, remat and precision from compile-time memory analysis; nothing is allocated."""

    recipe: Recipe
    memory: str | None = None
    """What there is of it, as in 16GiB; all of the device's by default."""
    json: bool = False
    """The table as JSON, and nothing else."""


def main(args: list[str]) -> int:
    """Parse, compile, print."""
    name, flags = recipe_name(args)
    asked = _parse(RECIPES[name], name, flags)
    memory = device_memory() if asked.memory is None else parsed_bytes(asked.memory)
    keep_compiled_programs()
    console = Console(highlight=False, quiet=asked.json)
    device = jax.local_devices()[0]
    console.print(f"{name} · {device.device_kind} · {shown_bytes(memory)}", markup=False)
    with console.status("reading the data") as status:
        found = plan(asked.recipe, memory, lambda recipe: _say(console, status, recipe))
    paste = command("train", name, found.chosen.recipe)
    if asked.json:
        told = {"recipe": name, "device": device.device_kind, "memory_bytes": memory}
        rows = list(table(found))
        sys.stdout.write(json.dumps({**told, "rows": rows, "command": paste}, indent=2) + "\n")
    console.print(_table(found))
    for note in notes(found):
        console.print(note, markup=False, soft_wrap=True)
    console.print(paste, markup=False, soft_wrap=True)
    return 0


def _parse(recipe: Recipe, name: str, flags: list[str]) -> Planned:
    kind = dataclasses.make_dataclass("Planned", [("recipe", type(recipe))], bases=(Planned,), frozen=True)
    kind.__doc__ = Planned.__doc__
    parsed: Any = parse(kind(recipe), flags, f"jaxtrain plan {name}")
    return parsed


def _say(console: Console, status: Any, recipe: Recipe) -> None:
    text = f"compiling {in_words(recipe)}"
    if console.is_terminal:
        status.update(text)
    else:
        console.print(f"{text} …", markup=False)


def _table(found: Plan) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("")
    for heading in ("micro-batch", "k", "remat", "precision", "peak memory", "GFLOP a step", "time"):
        shown.add_column(heading, justify="left" if heading in ("remat", "precision") else "right")
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
