"""The verdict on a port."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity.attestation import environment
from parity.verify.difference import Difference, Held
from parity.verify.planted import Planted

STAGES = ("interface", "numbers", "behaviour")


@dataclass(frozen=True)
class PortVerdict:
    """Whether a port is the training of its source.

    Attributes:
      source: The PyTorch file.
      target: The JAX file.
      seed: The seed of weights and data, by which the verdict can be repeated.
      held: The stages that hold.
      difference: The first difference; None if all stages hold.
      planted: How many planted bugs were noticed; None if the port differs or has no float64.
    """

    source: Path
    target: Path
    seed: int
    held: dict[str, Held] = field(default_factory=dict)
    difference: Difference | None = None
    planted: Planted | None = None

    @property
    def equal(self) -> bool:
        """Whether all stages hold."""
        return self.difference is None

    @property
    def notes(self) -> list[str]:
        """What the verdict rests on, and what was not compared."""
        return [note for held in self.held.values() for note in held.notes]

    @property
    def lines(self) -> list[str]:
        """The verdict in lines."""
        lines = [f"{self.target.name} {'is' if self.equal else 'is NOT'} the training of {self.source.name}"]
        lines += [f"  {stage}: {held.what}" for stage, held in self.held.items()]
        if self.difference is not None:
            first, *where = self.difference.lines
            lines += [f"  {self.difference.stage}: {first}", *(f"    {line}" for line in where)]
        if self.planted is not None:
            lines += [f"  {self.planted}", *(f"    unnoticed: {bug}" for bug in self.planted.unnoticed)]
        lines += [f"  note: {note}" for note in self.notes]
        return [*lines, f"  seed: {self.seed} of weights and data; --seed {self.seed} repeats it"]

    def as_json(self) -> dict[str, Any]:
        """Return the document of `parity verify --json`."""
        planted = self.planted
        return {
            "equal": self.equal,
            "source": str(self.source),
            "target": str(self.target),
            "seed": self.seed,
            "stages": {stage: self._stage(stage) for stage in STAGES},
            "difference": None if self.difference is None else self.difference.as_json(),
            "planted": None
            if planted is None
            else {
                "noticed": planted.total - len(planted.unnoticed),
                "total": planted.total,
                "unnoticed": [*planted.unnoticed],
            },
            "notes": self.notes,
            "environment": environment(),
        }

    def _stage(self, stage: str) -> dict[str, Any]:
        held, failed = self.held.get(stage), self.difference
        if held is not None:
            return {"result": "holds", "what": held.what, "figures": held.figures}
        if failed is not None and failed.stage == stage:
            return {"result": "differs", "what": failed.what, "figures": {}}
        return {"result": "not run", "what": "an earlier stage differs", "figures": {}}
