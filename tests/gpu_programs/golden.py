"""The figures of a program that are recorded in figures/, so that a change of them is a difference in a file."""

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxtrain.cost import GpuProgram

GOLDEN = Path(__file__).parent / "figures"
MIB = 2**20


def summary(compiled: GpuProgram) -> dict[str, Any]:
    """Return the figures of a program as JSON values."""
    collectives: Counter[str] = Counter()
    for transfer in compiled.transfers:
        collectives[f"{transfer.kind} of {', '.join(sorted(set(transfer.dtypes)))}"] += transfer.times
    return {
        "jaxlib": version("jaxlib"),
        "launches": dict(sorted(compiled.launch_counts.items())),
        "products": dict(sorted(compiled.product_dtypes.items())),
        "moved_mib": round(compiled.moved_bytes / MIB),
        "temporaries_mib": round(compiled.temporary_bytes / MIB),
        "collectives": dict(sorted(collectives.items())),
        "sent_mib": round(compiled.communication.sent / MIB, 1) if compiled.mesh else 0,
        **({"overlapped": round(compiled.overlap.by_bytes, 2)} if compiled.mesh else {}),
    }
