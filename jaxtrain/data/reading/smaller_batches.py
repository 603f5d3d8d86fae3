"""The smaller last batch of an epoch of a stream or a DataLoader: used, or dropped with a line."""

from collections.abc import Callable


class SmallerBatches:
    """Decides whether a smaller batch is used, and reports it once for each number of rows.

    Args:
      batch_size: Number of rows of the other batches.
      accumulate: Number of micro-batches that a batch is divided into.
      on_mesh: Whether rows are selected for the devices of a mesh, which takes whole batches.
      message: Prints one line.

    Example:
      >>> batches = SmallerBatches(4, 2, False, print)
      >>> batches.keeps(2, "batch 5"), batches.keeps(3, "batch 9")
      batch 5 has 2 rows, not 4: the step is compiled for them too
      batch 9 has 3 rows, not 4, which accumulate 2 does not divide: it is dropped
      (True, False)
    """

    def __init__(self, batch_size: int, accumulate: int, on_mesh: bool, message: Callable[[str], None]) -> None:
        self._batch_size, self._accumulate, self._on_mesh, self._message = batch_size, accumulate, on_mesh, message
        self._reported: set[int] = set()

    def keeps(self, rows: int, where: str) -> bool:
        """Return whether a batch of so few rows is used; `where` names it."""
        divides = rows % self._accumulate == 0
        is_kept = divides and not self._on_mesh
        if rows not in self._reported:
            self._reported.add(rows)
            text = f"{where} has {rows} rows, not {self._batch_size}"
            if is_kept:
                self._message(f"{text}: the step is compiled for them too")
            elif self._on_mesh:
                self._message(f"{text}, and a mesh takes whole batches: it is dropped")
            else:
                self._message(f"{text}, which accumulate {self._accumulate} does not divide: it is dropped")
        return is_kept
