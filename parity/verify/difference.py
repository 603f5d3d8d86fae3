"""What differs first between a source and its port, as a value."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
      stage: "interface", "numbers" or "behaviour".
      what: What differs, in one line.
      tensor: The tensor in which it shows, by PyTorch's name, or "loss"; None if there is none.
      tensors: All tensors in which it shows at that update.
      update: The update, counted from 1; None if there is none.
      distance: Relative distance of the tensor from PyTorch's; None if not measured.
      bar: The largest distance that holds.
      source_line: File, line number and text of PyTorch's operation or module; empty if unknown.
      target_line: The same of JAX's operation.
      operation: PyTorch's module and operation; empty if unknown.
    """

    stage: str
    what: str
    tensor: str | None = None
    tensors: tuple[str, ...] = ()
    update: int | None = None
    distance: float | None = None
    bar: float | None = None
    source_line: str = ""
    target_line: str = ""
    operation: str = ""

    @property
    def lines(self) -> list[str]:
        """The difference and where it is, one per line."""
        where = {"in PyTorch": self.source_line, "operation": self.operation, "in JAX": self.target_line}
        return [self.what, *(f"{name}: {text}" for name, text in where.items() if text)]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON. What is unknown is null, as is a distance that is not finite."""
        return {
            "stage": self.stage,
            "what": self.what,
            "tensor": self.tensor,
            "tensors": [*self.tensors],
            "update": self.update,
            "distance": self.distance if self.distance is not None and math.isfinite(self.distance) else None,
            "bar": self.bar,
            "source_line": self.source_line or None,
            "target_line": self.target_line or None,
            "operation": self.operation or None,
        }


@dataclass(frozen=True)
class Held:
    """A stage that holds.

    Attributes:
      what: What was compared, in one line.
      figures: Its distances by name.
      notes: Lines on what it rests on, and on what was not compared.
    """

    what: str
    figures: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
