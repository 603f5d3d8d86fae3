"""What was checked, said to people and to programs."""

from parity.report.document import document, gathered, row
from parity.report.result import Result
from parity.report.terminal import bars, divergence, table

__all__ = ["Result", "bars", "divergence", "document", "gathered", "row", "table"]
