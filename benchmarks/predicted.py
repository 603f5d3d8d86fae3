"""Workloads compiled for a GPU that need not be present: `python -m benchmarks.predicted WORKLOAD …`.

    JAX_PLATFORMS=cpu python -m benchmarks.predicted gpt2-124m --precision bf16 --scan --json figures.json

With a GPU the figures complement measured ones; without one they show how a change affects the program.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS
from jaxtrain.cost import GpuProgram, find_target, flops, format_bytes
from jaxtrain.distributed import data_parallel_size, parse_mesh
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse
from parity.case import Case


def case_program(
    case: Case,
    device: str = "h100",
    *,
    precision: str = "bf16",
    accumulate: int = 1,
    remat: str = "none",
    unroll: bool = True,
    mesh: str | None = None,
    rules: Any = None,
) -> GpuProgram:
    """Compile the training step of a case for a GPU.

    Args:
      case: The case.
      device: The GPU: h100, h200 or a100.
      precision: Name of the policy.
      accumulate: Micro-batches per window.
      remat: Rematerialization policy.
      unroll: Whether to unroll the loop over layers.
      mesh: Sizes of the mesh, such as "data=8"; None for one GPU. Every device that shards rows has the case's rows.
      rules: Sharding rules of the parameters.
    """
    import jaxtrain
    from jaxtrain.planning import gpu_program
    from parity.sides import jax_side

    step = jaxtrain.train_step(
        case.loss_fn,
        case.optimizer.jax,
        precision=precision,
        accumulate=accumulate,
        clip_norm=case.clip_norm,
        remat=remat,
        unroll=unroll,
    )
    shards = 1 if mesh is None else data_parallel_size(parse_mesh(mesh))
    batch = jax_side.arrays(case.batch(0, case.rows * shards), precision)
    return gpu_program(step, case.params_like, batch, device, mesh=mesh, rules=rules, model_state=case.state_like)


def model_flops(case: Case) -> int:
    """Return the FLOPs that the mathematics of a case's step requires, without rematerialization."""
    import jax

    import jaxtrain
    from parity.sides import jax_side

    step = jaxtrain.train_step(case.loss_fn, case.optimizer.jax, clip_norm=case.clip_norm)
    batch = jax_side.arrays(case.batch(0, case.rows), "fp32")
    return flops(step.pure, step.shapes(case.params_like, model_state=case.state_like), jax.eval_shape(lambda: batch))


def figures(program: GpuProgram, flop_count: int) -> dict[str, Any]:
    """Return the figures of a program as JSON values.

    Args:
      program: The program.
      flop_count: FLOPs of the model on one GPU.
    """
    return {
        "device": program.target.name,
        "moved_bytes": program.moved_bytes,
        "temporary_bytes": program.temporary_bytes,
        "peak_bytes": program.peak_bytes,
        "launches": sum(program.launch_counts.values()),
        "host_waits": program.host_waits,
        "products": dict(program.product_dtypes),
        "sent_bytes": program.communication.sent if program.mesh else 0,
        "overlap": program.overlap.by_bytes,
        "predicted_s": program.seconds,
        "mfu": flop_count / program.seconds / program.target.ceilings.half,
    }


@dataclass(frozen=True)
class Predicted:
    """Compile workloads for a GPU, and print what their programs move, launch and wait for."""

    workloads: Annotated[tuple[str, ...], Flag(positional=True, metavar="WORKLOAD")] = ()
    """Workloads of the suites."""
    device: str = "h100"
    """h100, h200 or a100."""
    precision: str = "bf16"
    """Policy."""
    accumulate: int = 1
    """Micro-batches per window."""
    remat: str = "none"
    """Rematerialization policy."""
    scan: bool = False
    """Keep the loop over layers."""
    mesh: str | None = None
    """Sizes of a mesh, such as "fsdp=8", with the workload's rows on every device."""
    depth: int | None = None
    """Number of layers; by default the workload's."""
    origins: int = 0
    """Print this many origins with most bytes."""
    json: Path | None = None
    """Write the figures."""
    hlo: Path | None = None
    """Folder that the programs are written to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile workloads and print their figures."""
    try:
        args = list(sys.argv[1:] if argv is None else argv)
        return _run(parse(Predicted(), args, "python -m benchmarks.predicted"))
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_status


def _run(options: Predicted) -> int:
    find_target(options.device)
    if not options.workloads:
        raise UserError(f"a workload is required: name some of {', '.join(WORKLOADS)}")
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        raise UserError(f"workload {unknown[0]!r} is unknown: choose from {', '.join(WORKLOADS)}")
    console, rows = Console(highlight=False), []
    for name in options.workloads:
        console.print(f"compiling {name} …")
        case = WORKLOADS[name].case({} if options.depth is None else {"depth": options.depth})
        program = case_program(
            case,
            options.device,
            precision=options.precision,
            accumulate=options.accumulate,
            remat=options.remat,
            unroll=not options.scan,
            mesh=options.mesh,
            rules=WORKLOADS[name].sharding(),
        )
        if options.hlo is not None:
            options.hlo.mkdir(parents=True, exist_ok=True)
            (options.hlo / f"{name}{'-scan' if options.scan else ''}.hlo").write_text(program.hlo)
        rows.append({"workload": name, **figures(program, model_flops(case))})
        for origin in program.origins()[: options.origins]:
            console.print(
                f"{origin.moved / 2**30:7.2f} GiB ×{origin.times:<4} {origin.kind} | {origin.op_name[-110:]}",
                soft_wrap=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    console.print(_table(rows))
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("workload", "moved", "temporaries", "launches", "waits", "sent", "overlapped", "predicted", "MFU")
    for row in rows:
        table.add_row(
            row["workload"],
            format_bytes(int(row["moved_bytes"])),
            format_bytes(row["temporary_bytes"]),
            f"{row['launches']:,}",
            str(row["host_waits"]),
            format_bytes(int(row["sent_bytes"])),
            f"{row['overlap']:.0%}",
            f"{1e3 * row['predicted_s']:.1f} ms",
            f"{row['mfu']:.0%}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
