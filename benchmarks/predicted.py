"""Workloads compiled for a GPU that need not be present: `python -m benchmarks.predicted WORKLOAD …`.

    JAX_PLATFORMS=cpu python -m benchmarks.predicted gpt2-124m --precision bf16 --scan --json figures.json

With a GPU the figures complement measured ones; without one they show how a change affects the program.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS
from jaxtrain.cost import GpuProgram, find_target, flops, format_bytes
from jaxtrain.distributed import data_parallel_size, parse_mesh
from jaxtrain.errors import UserError
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


def main(argv: Sequence[str] | None = None) -> int:
    """Compile workloads and print their figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predicted", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--device", default="h100", help="h100, h200 or a100 (default: h100)")
    parser.add_argument("--precision", default="bf16", help="policy (default: bf16)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per window (default: 1)")
    parser.add_argument("--remat", default="none", help="rematerialization policy (default: none)")
    parser.add_argument("--scan", action="store_true", help="keep the loop over layers")
    parser.add_argument("--mesh", help='sizes of a mesh, such as "fsdp=8", with the workload\'s rows on every device')
    parser.add_argument("--depth", type=int, help="number of layers instead of the workload's")
    parser.add_argument("--origins", type=int, default=0, metavar="N", help="print the N origins with most bytes")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="write the programs")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_status


def _run(arguments: argparse.Namespace) -> int:
    find_target(arguments.device)
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        raise UserError(f"workload {unknown[0]!r} is unknown: choose from {', '.join(WORKLOADS)}")
    console, rows = Console(highlight=False), []
    for name in arguments.workloads:
        console.print(f"compiling {name} …")
        case = WORKLOADS[name].case({} if arguments.depth is None else {"depth": arguments.depth})
        program = case_program(
            case,
            arguments.device,
            precision=arguments.precision,
            accumulate=arguments.accumulate,
            remat=arguments.remat,
            unroll=not arguments.scan,
            mesh=arguments.mesh,
            rules=WORKLOADS[name].sharding(),
        )
        if arguments.hlo is not None:
            arguments.hlo.mkdir(parents=True, exist_ok=True)
            (arguments.hlo / f"{name}{'-scan' if arguments.scan else ''}.hlo").write_text(program.hlo)
        rows.append({"workload": name, **figures(program, model_flops(case))})
        for origin in program.origins()[: arguments.origins]:
            console.print(
                f"{origin.moved / 2**30:7.2f} GiB ×{origin.times:<4} {origin.kind} | {origin.op_name[-110:]}",
                soft_wrap=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
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
