"""The table of the parts of a training state that `jaxtrain plan` prints."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from jaxtrain.cli.plans.scaling_tables import columns
from jaxtrain.cost import format_bytes
from jaxtrain.planning import StatePart


def state_table(parts: Sequence[StatePart]) -> Table:
    """Return the table of the parts of a state on one device."""
    table = columns(("state", "dtype", "size"), left=("state", "dtype"))
    for part in parts:
        table.add_row("", Text(part.name), Text(part.dtype), format_bytes(part.bytes))
    return table
