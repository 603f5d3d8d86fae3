"""What was checked, said to people and to programs."""

from parity.report.document import document
from parity.report.result import Result
from parity.report.terminal import bars, table

__all__ = ["Result", "bars", "document", "table"]
