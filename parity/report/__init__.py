"""Results as a table in the terminal, as JSON and as an HTML page."""

from parity.report.document import document, document_of_rows, row
from parity.report.live_status import waiting
from parity.report.result import Result
from parity.report.terminal import bars, divergence, table

__all__ = ["Result", "bars", "divergence", "document", "document_of_rows", "row", "table", "waiting"]
