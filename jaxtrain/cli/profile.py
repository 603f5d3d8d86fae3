"""`jaxtrain profile DIR`: a trace of some steps of a run, and where their time goes."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.arguments import parse
from jaxtrain.cli.compiled_programs import keep_compiled_programs
from jaxtrain.cost import ceilings
from jaxtrain.errors import UserError
from jaxtrain.profile import INPUT, Row, StepTrace, estimated_table, lines_of_now, newest_trace, time_table
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import Checkpoints, build_training, read_recipe, saved_steps

NO_OPERATIONS = "the trace has no operations; the driver may let only administrators profile"
_WARM_UP = 2


@dataclass(frozen=True)
class Profile:
    """Trace some steps of a run, from its newest checkpoint; the run itself stays as it is."""

    steps: int = 10
    """Steps to trace."""


def main(args: list[str]) -> int:
    """Parse, restore, trace, tell."""
    if any(a in ("-h", "--help") for a in args):
        args = ["DIR", "--help"]
    if not args or args[0].startswith("-"):
        raise UserError("which run? jaxtrain profile DIR")
    run, asked = RunFolder(Path(args[0])), parse(Profile(), args[1:], "jaxtrain profile DIR")
    if asked.steps < 1:
        raise UserError(f"{asked.steps} steps are none to trace: make --steps 1 or more")
    name, recipe = read_recipe(run)
    keep_compiled_programs()
    console = Console(highlight=False)
    console.print(f"{run.path} · {name} · {jax.devices()[0].device_kind} · {asked.steps} steps", markup=False)
    # Compiled whatever the last batches' shapes were.
    training, state = build_training(dataclasses.replace(recipe, allow_recompile=0))
    if saved_steps(run.checkpoints):
        with Checkpoints(run.checkpoints) as checkpoints:
            state, saved = checkpoints.restore(state)
        training.loader.restore(saved)
    batch = next(training.loader)
    with lines_of_now():
        hlo = training.step.compile(state, batch).as_text()
        for _ in range(_WARM_UP):
            state, metrics = training.step(state, batch)
    jax.block_until_ready((state, metrics))
    folder = run.path / "profile"
    with StepTrace(folder):
        start = time.perf_counter()
        for _ in range(asked.steps):
            with jax.profiler.TraceAnnotation(INPUT):
                batch = next(training.loader)
            state, metrics = training.step(state, batch)
        jax.block_until_ready((state, metrics))
        took = time.perf_counter() - start
    trace = newest_trace(folder)
    rows = time_table(trace, hlo)
    if rows:
        tell(console, rows, asked.steps)
    else:
        device = jax.local_devices()[0]
        jaxpr = jax.make_jaxpr(training.step.pure)(state, batch).jaxpr
        console.print(NO_OPERATIONS)
        console.print(f"a step takes {1e3 * took / asked.steps:.2f} ms by the clock")
        title = f"estimated by the roofline of {device.device_kind}, not measured"
        print_table(console, estimated_table(jaxpr, ceilings(device), asked.steps), asked.steps, title)
    console.print(f"the trace: {trace}", markup=False, soft_wrap=True)
    console.print(f"to see it: xprof --logdir {folder}", markup=False, soft_wrap=True)
    return 0


def tell(console: Console, rows: list[Row], steps: int) -> None:
    """Print the table, times by step."""
    if not rows:
        console.print(f"{NO_OPERATIONS}: jaxtrain profile DIR estimates them")
        return
    whole = sum(row.seconds for row in rows)
    print_table(console, rows, steps, f"a step takes {1e3 * whole / steps:.2f} ms, in operations of the trace")


def print_table(console: Console, rows: list[Row], steps: int, title: str) -> None:
    """Print the rows of so many steps, times by step."""
    whole = sum(row.seconds for row in rows)
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left")
    table.add_column("", max_width=40, no_wrap=True)
    for heading in ("ms a step", "share", "a step"):
        table.add_column(heading, justify="right")
    table.add_column("line", no_wrap=True)
    for row in rows:
        table.add_row(row.kind, *_cells(row.seconds, whole, row.count, steps), "", style="bold")
        for top in row.top:
            cells = map(Text, _cells(top.seconds, whole, top.count, steps))
            table.add_row(Text(f"  {top.name}"), *cells, Text(top.line), style="dim")
    console.print(table)


def _cells(seconds: float, whole: float, count: int, steps: int) -> tuple[str, str, str]:
    return f"{1e3 * seconds / steps:.3f}", f"{100 * seconds / whole:.1f}%", f"{count / steps:.4g}" if count else ""
