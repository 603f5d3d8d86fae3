"""The tables of `jaxtrain plan --mesh`: what a device holds and sends, and how that goes on as the mesh grows."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.cost import shown_bytes
from jaxtrain.observe import format_count
from jaxtrain.planning import Share, first_axis


@dataclass(frozen=True)
class Scaled:
    """A recipe on the mesh `spec` (`own`), and on those on the way through it, up to the one that cannot be; `why` it
    cannot. What there is: `memory` of a device in bytes, `bandwidth` of its links in bytes/s; None where nobody said.
    """

    spec: str
    own: Share
    shares: Sequence[Share]
    why: str | None
    device: str = ""
    memory: int | None = None
    bandwidth: float | None = None

    def fits(self, share: Share) -> bool:
        """Whether there is room for it."""
        return self.memory is None or share.memory.peak <= self.memory

    def communication_s(self, sent: float) -> float | None:
        """Seconds that so many bytes take."""
        return None if self.bandwidth is None else sent / self.bandwidth

    def communication_share(self, share: Share) -> float | None:
        """Of a step's time, where communication is not hidden behind arithmetic."""
        seconds = self.communication_s(share.communication.sent)
        return None if seconds is None else seconds / (seconds + share.seconds)


def as_json(scaled: Scaled) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "mesh": scaled.spec,
        "grows": first_axis(scaled.spec),
        "device": scaled.device,
        "memory_bytes": scaled.memory,
        "bandwidth_bytes_per_s": scaled.bandwidth,
        "own": _row(scaled, scaled.own),
        "rows": [_row(scaled, share) for share in scaled.shares],
        "ends": scaled.why,
    }


def _row(scaled: Scaled, share: Share) -> dict[str, Any]:
    return {
        "devices": share.devices,
        "mesh": share.recipe.mesh,
        "batch_size": share.recipe.batch_size,
        "accumulate": share.recipe.accumulate,
        "micro_batch_per_device": share.rows,
        **{f"{name}_bytes": size for name, size in dataclasses.asdict(share.memory).items()},
        "fits": scaled.fits(share),
        "sent_bytes": share.communication.sent,
        "traffic": [part._asdict() for part in share.communication.traffic],
        "communication_s": scaled.communication_s(share.communication.sent),
        "compute_s": share.seconds,
        "communication_share": scaled.communication_share(share),
        "flops": share.flops,
        "compile_s": share.compile_s,
    }


def show(console: Console, scaled: Scaled) -> None:
    """All of it, for a person."""
    own = scaled.own
    recipe = own.recipe
    console.print(
        f"one of {own.devices} devices, with {own.rows} of the {recipe.batch_size // recipe.accumulate} rows of a "
        f"micro-batch, {recipe.accumulate} to an update",
        soft_wrap=True,
    )
    console.print(_memory_table(own))
    console.print(_traffic_table(scaled))
    console.print(_arithmetic(scaled), markup=False, soft_wrap=True)
    console.print(_growth_table(scaled))
    for note in _notes(scaled):
        console.print(note, markup=False, soft_wrap=True)


def columns(headings: Sequence[str], left: Sequence[str]) -> Table:
    """An empty table with a column for marks before these."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in left else "right")
    return shown


def _memory_table(own: Share) -> Table:
    memory = own.memory
    shown = columns(("it holds", "bytes"), left=("it holds",))
    held = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "batch": memory.batch,
        "gradients": memory.gradients,
        "other temporaries": memory.temporaries - memory.gradients,
        "all, at the peak": memory.peak,
    }
    for what, size in held.items():
        shown.add_row("", what, shown_bytes(size))
    return shown


def _traffic_table(scaled: Scaled) -> Table:
    headings = ("it sends in a step", "over", "times", "bytes")
    timed = () if scaled.bandwidth is None else (f"at {_bandwidth(scaled.bandwidth)}",)
    shown = columns((*headings, *timed), left=headings[:2])

    def add(kind: str, over: str, times: int, sent: float) -> None:
        seconds = scaled.communication_s(sent)
        shown.add_row("", kind, over, str(times), shown_bytes(sent), *([] if seconds is None else [_time(seconds)]))

    communication = scaled.own.communication
    for part in communication.traffic:
        add(part.kind, " × ".join(part.axes), part.times, part.sent)
    add("all", "", sum(part.times for part in communication.traffic), communication.sent)
    return shown


def _arithmetic(scaled: Scaled) -> str:
    own, part = scaled.own, scaled.communication_share(scaled.own)
    said = (
        f"its arithmetic: {format_count(own.flops)} FLOP a step, {_time(own.seconds)} by a roofline of {scaled.device}"
    )
    return said if part is None else f"{said}; communication is {part:.0%} of a step if none is hidden behind that"


def _growth_table(scaled: Scaled) -> Table:
    timed = () if scaled.bandwidth is None else ("time", "share")
    shown = columns(("devices", "mesh", "micro-batch", "memory", "sent", *timed), left=("mesh",))
    for share in scaled.shares:
        own, fits = share.mesh == scaled.own.mesh, scaled.fits(share)
        seconds, part = scaled.communication_s(share.communication.sent), scaled.communication_share(share)
        cells = (
            str(share.devices),
            str(share.recipe.mesh),
            str(share.rows),
            shown_bytes(share.memory.peak),
            shown_bytes(share.communication.sent),
            *([] if seconds is None else [_time(seconds), f"{part:.0%}"]),
        )
        mark = "✗" if not fits else "→" if own else " "
        shown.add_row(*map(Text, (mark, *cells)), style="dim" if not fits else "bold green" if own else "")
    return shown


def _notes(scaled: Scaled) -> list[str]:
    own, grows = scaled.own, first_axis(scaled.spec)
    kept = ", ".join(f"{axis}={n}" for axis, n in own.mesh.items() if n > 1 and axis != grows)
    said = [
        f"{grows} grows{f', {kept} stays' if kept else ''}; all of it is of one device, whose {own.rows} rows "
        "of a micro-batch stay"
    ]
    if scaled.why is not None:
        said.append(scaled.why)
    if own.communication.endless:
        said.append(f"{own.communication.endless} loops whose length the program does not know count once")
    return said


def _bandwidth(rate: float) -> str:
    prefix, size = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if rate >= s), ("K", 1e3))
    return f"{rate / size:.3g} {prefix}B/s"


def _time(seconds: float) -> str:
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("µs", 1e-6))
    return f"{seconds / size:.3g} {unit}"
