"""One check with its settings and its result."""

from dataclasses import dataclass

from parity.case import Case
from parity.compare.examination import Examination
from parity.compare.verdict import Verdict
from parity.settings import Settings


@dataclass(frozen=True)
class Result:
    """One check.

    Attributes:
      case: The case.
      precision: The precision.
      settings: The settings.
      examination: The verdict with its runs.
      dropout: The dropout rate, if one was requested.
    """

    case: Case
    precision: str
    settings: Settings
    examination: Examination
    dropout: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict of the examination."""
        return self.examination.verdict
