"""The tables of `jaxtrain plan --mesh`: memory and communication per device, and how both scale with the mesh."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cost import format_bytes
from jaxtrain.distributed import sequence_parallel_size
from jaxtrain.observe import format_count
from jaxtrain.planning import (
    Context,
    DeviceShare,
    first_axis,
    gathered_params_json,
    gathered_params_note,
    gradient_sums_note,
)


@dataclass(frozen=True)
class ScalingTables:
    """A recipe on one mesh and on a series of growing meshes.

    Attributes:
      spec: The mesh, such as "data=2,fsdp=4".
      own: A device's share on that mesh.
      shares: A device's share on each mesh of the series, in order of size.
      why: Why the series ends where it ends; None if it is complete.
      contexts: Memory on that mesh by context length, if it divides sequences.
      device: Device type that compute time is estimated for.
      memory: Memory of a device in bytes; None for no limit.
      bandwidth: Bandwidth of a device's links in bytes/s; None if unknown.
    """

    spec: str
    own: DeviceShare
    shares: Sequence[DeviceShare]
    why: str | None
    contexts: Sequence[Context] = ()
    device: str = ""
    memory: int | None = None
    bandwidth: float | None = None

    def fits(self, share: DeviceShare | Context) -> bool:
        """Return whether the share fits in a device's memory."""
        return self.memory is None or share.memory.peak <= self.memory

    def communication_s(self, sent: float) -> float | None:
        """Return the time in seconds to send this many bytes; None without a bandwidth."""
        return None if self.bandwidth is None else sent / self.bandwidth

    def communication_share(self, share: DeviceShare) -> float | None:
        """Return communication's share of the step time if it does not overlap with compute."""
        seconds = self.communication_s(share.communication.sent)
        return None if seconds is None else seconds / (seconds + share.seconds)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "mesh": self.spec,
            "grows": first_axis(self.spec),
            "device": self.device,
            "memory_bytes": self.memory,
            "bandwidth_bytes_per_s": self.bandwidth,
            "own": self._row(self.own),
            "rows": [self._row(share) for share in self.shares],
            "ends": self.why,
            "contexts": [
                {"length": c.length, "temporaries_bytes": c.memory.temporaries, "peak_bytes": c.memory.peak}
                | {"fits": self.fits(c)}
                for c in self.contexts
            ],
        }

    def _row(self, share: DeviceShare) -> dict[str, Any]:
        return {
            "devices": share.devices,
            "mesh": share.recipe.mesh,
            "batch_size": share.recipe.batch_size,
            "accumulate": share.recipe.accumulate,
            "micro_batch_per_device": share.rows,
            **{f"{name}_bytes": size for name, size in dataclasses.asdict(share.memory).items()},
            "fits": self.fits(share),
            "gradient_sums": share.sums.as_json(share.recipe),
            "gathered_params": gathered_params_json(share.recipe, share.gathered_bytes),
            "sent_bytes": share.communication.sent,
            "traffic": [part._asdict() for part in share.communication.traffic],
            "communication_s": self.communication_s(share.communication.sent),
            "compute_s": share.seconds,
            "communication_share": self.communication_share(share),
            "flops": share.flops,
            "compile_s": share.compile_s,
        }

    def print(self, console: Console) -> None:
        """Print the tables."""
        own, recipe = self.own, self.own.recipe
        console.print(
            f"per device, one of {own.devices}: {own.rows} of the {recipe.batch_size // recipe.accumulate} rows of a "
            f"micro-batch, {recipe.accumulate} micro-batches per update",
            soft_wrap=True,
        )
        console.print(_memory_table(own))
        console.print(self._traffic_table())
        console.print(self._compute(), markup=False, soft_wrap=True)
        console.print(self._growth_table())
        for note in self._notes():
            console.print(note, markup=False, soft_wrap=True)
        if self.contexts:
            console.print(self._context_table())

    def _context_table(self) -> Table:
        table = columns(("context", "tokens per device", "temporaries", "memory"), left=())
        n = sequence_parallel_size(self.own.mesh)
        for context in self.contexts:
            fits, memory = self.fits(context), context.memory
            cells = (
                f"{context.length:,}",
                f"{context.length // n:,}",
                *map(format_bytes, (memory.temporaries, memory.peak)),
            )
            table.add_row(*map(Text, (" " if fits else "✗", *cells)), style="" if fits else "dim")
        return table

    def _traffic_table(self) -> Table:
        headings = ("sent per step", "over", "times", "bytes")
        timed = () if self.bandwidth is None else (f"at {_bandwidth(self.bandwidth)}",)
        table = columns((*headings, *timed), left=headings[:2])

        def add(kind: str, over: str, times: int, sent: float) -> None:
            seconds = self.communication_s(sent)
            table.add_row(
                "", kind, over, str(times), format_bytes(sent), *([] if seconds is None else [_time(seconds)])
            )

        communication = self.own.communication
        for part in communication.traffic:
            add(part.kind, " × ".join(part.axes), part.times, part.sent)
        add("total", "", sum(part.times for part in communication.traffic), communication.sent)
        return table

    def _compute(self) -> str:
        own, share = self.own, self.communication_share(self.own)
        compute = f"compute: {format_count(own.flops)} FLOP/step, {_time(own.seconds)} by the roofline of {self.device}"
        return compute if share is None else f"{compute}; communication is {share:.0%} of a step without overlap"

    def _growth_table(self) -> Table:
        timed = () if self.bandwidth is None else ("time", "share")
        table = columns(("devices", "mesh", "micro-batch", "memory", "sent", *timed), left=("mesh",))
        for share in self.shares:
            own, fits = share.mesh == self.own.mesh, self.fits(share)
            seconds, part = self.communication_s(share.communication.sent), self.communication_share(share)
            cells = (
                str(share.devices),
                str(share.recipe.mesh),
                str(share.rows),
                format_bytes(share.memory.peak),
                format_bytes(share.communication.sent),
                *([] if seconds is None else [_time(seconds), f"{part:.0%}"]),
            )
            mark = "✗" if not fits else "→" if own else " "
            table.add_row(*map(Text, (mark, *cells)), style="dim" if not fits else "bold green" if own else "")
        return table

    def _notes(self) -> list[str]:
        own, axis = self.own, first_axis(self.spec)
        fixed = ", ".join(f"{name}={n}" for name, n in own.mesh.items() if n > 1 and name != axis)
        notes = [
            f"{axis} grows{f', {fixed} fixed' if fixed else ''}; all values are per device, "
            f"with {own.rows} rows of a micro-batch on each"
        ]
        # With a limit of memory, the plan that fits it has the note.
        if self.memory is None:
            of_fsdp = gradient_sums_note(own.recipe, own.sums), gathered_params_note(own.recipe, own.gathered_bytes)
            notes += [note for note in of_fsdp if note is not None]
        if self.why is not None:
            notes.append(self.why)
        if own.communication.unbounded_loops:
            notes.append(f"{own.communication.unbounded_loops} loops of unknown length are counted as one iteration")
        return notes


def columns(headings: Sequence[str], left: Sequence[str]) -> Table:
    """Return an empty table with these columns after one for marks; those in `left` are left-aligned."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def _memory_table(own: DeviceShare) -> Table:
    memory = own.memory
    table = columns(("memory", "bytes"), left=("memory",))
    parts = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "batch": memory.batch,
        "gradients": memory.gradients,
        "other temporaries": memory.temporaries - memory.gradients,
        "peak": memory.peak,
    }
    for name, size in parts.items():
        table.add_row("", name, format_bytes(size))
    return table


def _bandwidth(rate: float) -> str:
    prefix, size = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if rate >= s), ("K", 1e3))
    return f"{rate / size:.3g} {prefix}B/s"


def _time(seconds: float) -> str:
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("µs", 1e-6))
    return f"{seconds / size:.3g} {unit}"
