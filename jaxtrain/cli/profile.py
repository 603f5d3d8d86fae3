"""`jaxtrain profile DIR`: trace some steps of a run and print where their time goes."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.compilation_cache import enable_compilation_cache
from jaxtrain.cost import ceilings, known_ceilings
from jaxtrain.distributed import run_devices
from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.flags import Flag, parse
from jaxtrain.profile import INPUT, Row, StepTrace, current_source_lines, estimate_table, newest_trace, time_table
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import Checkpoints, Unsaved, build_training, read_recipe, saved_steps

NO_OPERATIONS = "the trace has no operations; the driver may restrict profiling to administrators"
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Profile:
    """Trace some steps of a run, starting at its newest checkpoint; the run itself is not changed."""

    folder: Annotated[str, Flag(positional=True, metavar="DIR")] = ""
    """The run's folder."""
    steps: int = 10
    """Steps to trace."""


def main(args: list[str]) -> int:
    """Parse, restore, trace, print."""
    options = parse(Profile(), args, "jaxtrain profile")
    run = RunFolder(Path(options.folder))
    if options.steps < 1:
        raise UserError(f"--steps must be positive, got {options.steps}: use 1 or more")
    name, recipe = read_recipe(run)
    enable_compilation_cache()
    console = Console(highlight=False)
    device = run_devices(recipe.mesh)[0]
    where = escape_unprintable(f"{run.path} · {name}")
    console.print(f"{where} · {device.device_kind} · {options.steps} steps", markup=False)
    # Compile for the shape of the next batch, whatever the shapes before it were.
    training = build_training(dataclasses.replace(recipe, allow_recompile=0))
    if saved_steps(run.checkpoints):
        with Checkpoints(run.checkpoints, unsaved=Unsaved.of(training.task)) as checkpoints:
            state, saved = checkpoints.restore(training.shapes())
        training.loader.restore(saved)
    else:
        state = training.init()
    batch = next(training.loader)
    step = training.step_of(batch)
    with current_source_lines():
        hlo = step.compile(state, batch).as_text()
        for _ in range(_WARM_UP_STEPS):
            state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    out = run.path / "profile"
    with StepTrace(out):
        start = time.perf_counter()
        for _ in range(options.steps):
            with jax.profiler.TraceAnnotation(INPUT):
                fetched = next(training.loader)
            if training.step_of(fetched) is step:  # a smaller one would be compiled in the trace
                batch = fetched
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        elapsed = time.perf_counter() - start
    trace = newest_trace(out)
    rows = time_table(trace, hlo)
    if rows:
        print_time_table(console, rows, options.steps)
    else:
        jaxpr = jax.make_jaxpr(step.pure)(state, batch).jaxpr
        console.print(NO_OPERATIONS)
        console.print(f"{1e3 * elapsed / options.steps:.2f} ms per step, wall-clock time")
        title = f"estimated by the roofline of {_roofline_of(device)}, not measured"
        print_table(console, estimate_table(jaxpr, ceilings(device), options.steps), options.steps, title)
    console.print(f"trace: {trace}", markup=False, soft_wrap=True)
    console.print(f"view it with: xprof --logdir {escape_unprintable(str(out))}", markup=False, soft_wrap=True)
    return 0


def _roofline_of(device: jax.Device) -> str:
    is_known = known_ceilings(device) is not None
    return device.device_kind if is_known else f"an A100, because that of {device.device_kind} is not known"


def print_time_table(console: Console, rows: list[Row], steps: int) -> None:
    """Print the time table of a trace of `steps` steps, in time per step."""
    if not rows:
        console.print(f"{NO_OPERATIONS}: jaxtrain profile DIR estimates their time")
        return
    whole = sum(row.seconds for row in rows)
    print_table(console, rows, steps, f"{1e3 * whole / steps:.2f} ms per step, in traced operations")


def print_table(console: Console, rows: list[Row], steps: int, title: str) -> None:
    """Print the rows of `steps` steps, in time per step."""
    whole = sum(row.seconds for row in rows)
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left")
    table.add_column("", max_width=40)
    for heading in ("ms/step", "share", "per step"):  # a narrow terminal shortens names, and not these
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("line", no_wrap=True)
    for row in rows:
        table.add_row(row.kind, *_cells(row.seconds, whole, row.count, steps), "", style="bold")
        for top in row.top:
            cells = map(Text, _cells(top.seconds, whole, top.count, steps))
            name = Text(f"  {top.name}", no_wrap=True, overflow="ellipsis")
            table.add_row(name, *cells, Text(top.line), style="dim")
    console.print(table)


def _cells(seconds: float, whole: float, count: int, steps: int) -> tuple[str, str, str]:
    return f"{1e3 * seconds / steps:.3f}", f"{100 * seconds / whole:.1f}%", f"{count / steps:.4g}" if count else ""
