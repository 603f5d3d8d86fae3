"""`jaxtrain plan RECIPE --device h100 [--mesh …]`: a plan from the programs of a GPU that is not here.

Memory, time and communication are those of the program compiled for the GPU; see `jaxtrain.cost.gpu`.
"""

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cli.plans.scaling_tables import columns
from jaxtrain.cli.plans.state_table import state_table
from jaxtrain.cli.progress_line import show_progress
from jaxtrain.cost import (
    SHARE_OF_PEAK,
    Buffer,
    GpuProgram,
    GpuTarget,
    find_target,
    format_bytes,
    gpu_devices,
    parse_bytes,
    utilization_note,
)
from jaxtrain.distributed import parse_mesh
from jaxtrain.planning import Candidate, Plan, choice_notes, format_settings, gathered_params_json, plan
from jaxtrain.recipes import command
from jaxtrain.run import Recipe

PREALLOCATED = 0.75
"""Share of a GPU's memory that JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


def plan_for_gpu(name: str, recipe: Recipe, device: str, memory: str | None, as_json: bool) -> int:
    """Compile candidates for a GPU and print them, the chosen one's program and its command.

    Args:
      name: Name of the recipe.
      recipe: The recipe.
      device: Name of the GPU, one of `jaxtrain.cost.gpu.TARGETS`.
      memory: Memory of a GPU, such as 40GiB; by default what JAX preallocates.
      as_json: Whether to print JSON and nothing else.

    Raises:
      UserError: The GPU is unknown, or the plugin that compiles for it is missing.
      RunFailed: Nothing fits.
    """
    target = find_target(device)
    # The plugin would look for a driver; nothing of this command runs on a GPU.
    jax.config.update("jax_platforms", "cpu")
    devices = gpu_devices(target, 1 if recipe.mesh is None else math.prod(parse_mesh(recipe.mesh).values()))
    available = available_memory(target, memory)
    console = Console(highlight=False, quiet=as_json)
    console.print(
        f"{name} · {_title(target, recipe)} · {describe_memory(available, target, memory)}",
        markup=False,
        soft_wrap=True,
    )
    with console.status("reading the data") as status:
        found = plan(
            recipe,
            available,
            lambda candidate: show_progress(console, status, _compiling(candidate)),
            precisions=(recipe.precision,),
            devices=devices,
            target=target,
        )
    rows = list(_rows(found))
    if as_json:
        context = {"recipe": name, "device": target.name, "mesh": recipe.mesh, "memory_bytes": available}
        state = [part._asdict() for part in found.state]
        kept = {
            "gradient_sums": found.sums.as_json(found.chosen.recipe),
            "gathered_params": gathered_params_json(found.chosen.recipe, found.gathered_bytes),
            "fp8": found.fp8 or None,
        }
        values = {**context, "rows": rows, "state": state, **kept, "chosen": _details(found.chosen)}
        sys.stdout.write(
            json.dumps({**values, "command": command("train", name, found.chosen.recipe)}, indent=2) + "\n"
        )
        return 0
    console.print(_candidates(found, rows))
    console.print(state_table(found.state))
    for note in filter(None, [utilization_note(recipe.precision), *choice_notes(found)]):
        console.print(note, markup=False, soft_wrap=True)
    _print_program(console, found.chosen)
    console.print(command("train", name, found.chosen.recipe), markup=False, soft_wrap=True)
    return 0


def _title(target: GpuTarget, recipe: Recipe) -> str:
    return target.name if recipe.mesh is None else f"{recipe.mesh} of {target.name}"


def available_memory(target: GpuTarget, given: str | None) -> int:
    """Return the given memory of a GPU, or what JAX takes by default."""
    return int(PREALLOCATED * target.memory) if given is None else parse_bytes(given)


def describe_memory(available: int, target: GpuTarget, given: str | None) -> str:
    """Return the memory as text."""
    if given is not None:
        return format_bytes(available)
    return (
        f"{format_bytes(available)}, the {PREALLOCATED:.0%} of {format_bytes(target.memory)} that JAX takes by default"
    )


def _compiling(recipe: Recipe) -> str:
    return f"compiling {format_settings(recipe)}{', unrolled' if recipe.unroll else ''}"


def model_flops_utilization(candidate: Candidate) -> float:
    """Return the model FLOPs per second of a candidate over the peak rate, `Ceilings.of_precision`."""
    assert candidate.program is not None
    peak = candidate.program.target.ceilings.of_precision(candidate.recipe.precision)
    return candidate.flops / candidate.seconds / peak


def _rows(found: Plan) -> Iterator[dict[str, Any]]:
    for candidate in found.candidates:
        program = _program(candidate)
        yield {
            "micro_batch": candidate.micro_batch,
            "accumulate": candidate.recipe.accumulate,
            "remat": candidate.recipe.remat,
            "unroll": candidate.recipe.unroll,
            "precision": candidate.recipe.precision,
            "peak_bytes": candidate.peak_bytes,
            "state_bytes": candidate.state_bytes,
            "temporary_bytes": program.temporary_bytes,
            "moved_bytes": program.moved_bytes,
            "launches": sum(program.launch_counts.values()),
            "flops": candidate.flops,
            "predicted_s": candidate.seconds,
            "mfu": model_flops_utilization(candidate),
            "compile_s": candidate.compile_s,
            "fits": found.fits(candidate),
            "chosen": candidate is found.chosen,
        }


def _program(candidate: Candidate) -> GpuProgram:
    assert candidate.program is not None
    return candidate.program


def _details(candidate: Candidate) -> dict[str, Any]:
    """Return what the program of a candidate launches, moves and holds, as JSON values."""
    program = _program(candidate)
    return {
        "compiler_options": dict(program.compiler_options),
        "launches": dict(program.launch_counts),
        "products": dict(program.product_dtypes),
        "host_waits": program.host_waits,
        "product_s": program.product_seconds,
        "traffic_s": program.traffic_seconds,
        "exposed_communication_s": program.exposed_seconds,
        "sent_bytes": program.communication.sent if program.mesh else 0,
        "buffers": [vars(buffer) for buffer in program.largest_buffers()],
        "origins": [origin._asdict() for origin in program.origins()[:20]],
    }


def _candidates(found: Plan, rows: list[dict[str, Any]]) -> Table:
    headings = ("micro-batch", "k", "remat", "unroll", "memory", "moved", "time", "MFU")
    table = columns(headings, left=("remat", "unroll"))
    for row in rows:
        style = "bold green" if row["chosen"] else "" if row["fits"] else "dim"
        mark = "→" if row["chosen"] else " " if row["fits"] else "✗"
        cells = (
            str(row["micro_batch"]),
            str(row["accumulate"]),
            row["remat"],
            "yes" if row["unroll"] else "no",
            format_bytes(row["peak_bytes"]),
            format_bytes(row["moved_bytes"]),
            _milliseconds(row["predicted_s"]),
            f"{row['mfu']:.0%}",
        )
        table.add_row(*map(Text, (mark, *cells)), style=style)
    return table


def _print_program(console: Console, chosen: Candidate) -> None:
    program = _program(chosen)
    parts = [
        f"products {_milliseconds(program.product_seconds)} at {SHARE_OF_PEAK:.0%} of the peak rate",
        f"other memory traffic {_milliseconds(program.traffic_seconds)}",
    ]
    if program.mesh:
        sent = format_bytes(program.communication.sent)
        parts.append(f"communication that nothing overlaps {_milliseconds(program.exposed_seconds)} ({sent} sent)")
    console.print(f"predicted: {', '.join(parts)}", markup=False, soft_wrap=True)
    dtypes = ", ".join(f"{times} {dtypes}" for dtypes, times in program.product_dtypes.most_common())
    console.print(f"products: {dtypes}", markup=False, soft_wrap=True)
    launches = ", ".join(f"{times:,} {kind}" for kind, times in program.launch_counts.most_common())
    console.print(f"launches: {launches}", markup=False, soft_wrap=True)
    if program.host_waits:
        console.print(f"the host waits for the GPU in {program.host_waits} places of a step", markup=False)
    console.print(_buffers(program.largest_buffers()))


def _buffers(buffers: list[Buffer]) -> Table:
    headings = ("largest temporaries at the peak", "count", "size", "computed in")
    table = columns(headings, left=("computed in",))
    for buffer in buffers:
        size = format_bytes(int(buffer.total_bytes))
        table.add_row("", Text(buffer.shape), str(buffer.count), size, Text(buffer.line))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
