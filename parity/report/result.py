"""One check: what was asked, and what was seen."""

from dataclasses import dataclass

from parity.case import Case
from parity.compare import Verdict
from parity.run import Examination, Settings


@dataclass(frozen=True)
class Result:
    """A case, the settings it was examined under, and the examination. `dropout`: the rate asked for, if any."""

    case: Case
    precision: str
    settings: Settings
    examination: Examination
    dropout: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on it."""
        return self.examination.verdict
