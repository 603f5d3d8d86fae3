"""Tables of a page."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from jaxtrain.pages.page import macros


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows.

    Attributes:
      heading: Names of the columns; none for no heading.
      rows: The cells, as texts, or as markup if they have `__html__`.
      label: What the table shows, for screen readers.
      numbers: Columns that are aligned at the right.
      wraps: Whether long cells are broken into lines.
    """

    heading: Sequence[object]
    rows: Sequence[Sequence[object]]
    label: str = "table"
    numbers: Container[int] = ()
    wraps: bool = False

    def __html__(self) -> str:
        return str(macros().table(self))
