"""One check: what was asked, and the verdict."""

from dataclasses import dataclass

from parity.case import Case
from parity.compare import Verdict


@dataclass(frozen=True)
class Result:
    """A case, the settings it was checked under, and the verdict on it. `dropout`: the rate asked for, if any."""

    case: Case
    precision: str
    accumulate: int
    remat: str
    dropout: float | None
    steps: int
    seed: int
    verdict: Verdict
