"""Plant bugs one at a time, to show that the harness finds them, and run clean cases, where it must find none."""

import json
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.case import Case
from parity.compare.verdict import Verdict
from parity.explain.locate import locate
from parity.mutate.mutant import Mutant
from parity.mutate.operation_bugs import mutants_of
from parity.run import check
from parity.settings import EXACT

if TYPE_CHECKING:
    from rich.console import Console

STEPS = 4
"""Some bugs show in the second or third step only."""
LOW_STEPS = 8
"""Steps of a clean run in low precision: the errors of two losses alone are too few to compare."""
SHORT_OF_FP64 = ("fp32", "bf16")


@dataclass(frozen=True)
class Outcome:
    """What the harness found of one mutant.

    Attributes:
      name: Name of the mutant.
      case: Name of its case.
      caught: Whether the verdict on the mutated case is that it differs.
      located: Whether it was located in the right place; None if no place is planted or none was asked for.
      clean: Whether the case without the bug holds.
      clean_runs: 1 if that was run for this mutant; 0 if the verdict was taken from an earlier one with the same case.
      loss_rel: That of the verdict.
      grad_rel_max: That of the verdict.
      found: Faults of the clean case, or else where the mutant was located.
    """

    name: str
    case: str
    caught: bool
    located: bool | None
    clean: bool
    clean_runs: int
    loss_rel: float
    grad_rel_max: float
    found: str = ""


def mutants_in(references: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the modules that a user's files define.

    Args:
      references: `path/to/file.py::function`, of functions that return a module and an example batch.

    Raises:
      UserError: A reference names no function of a file, or its module cannot be imported.
    """
    from jaxtrain.errors import UserError
    from parity.cases.module import imported
    from parity.cases.own import own_factory

    found: list[Mutant] = []
    for reference in references:
        if "::" not in reference:
            raise UserError(f"{reference} is no FILE.py::FACTORY: give a function that returns a module and a batch")
        model, case = imported(reference.rpartition("::")[2], own_factory(reference), unroll=True)
        found += mutants_of(model.graph, case)
    return found


def outcomes(mutants: Iterable[Mutant], located: bool = True) -> Iterator[Outcome]:
    """Plant mutants one at a time, and yield what the harness finds of each.

    Args:
      mutants: The mutants. Those with the same clean case share its verdict.
      located: Whether to locate the differences as well.
    """
    clean = _CleanVerdicts()
    for mutant in mutants:
        yield _outcome(mutant, clean, located)


class _CleanVerdicts:
    """Verdicts on cases without a bug, which many mutants share.

    A mutant that changes the surroundings of its clean case too (`Mutant.around`) is always run.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._verdicts: dict[Hashable, Verdict] = {}

    def of(self, mutant: Mutant, settings: dict[str, Any]) -> Verdict:
        key: tuple[Callable[[], Case], Hashable] = (mutant.clean, tuple(sorted(settings.items())))
        if mutant.around is nullcontext and key in self._verdicts:
            return self._verdicts[key]
        self.runs += 1
        return self._verdicts.setdefault(key, check(mutant.clean(), **settings))


def _outcome(mutant: Mutant, clean_verdicts: _CleanVerdicts, located: bool) -> Outcome:
    settings = {"steps": STEPS, **mutant.settings}
    place, found, before = None, None, clean_verdicts.runs
    with mutant.around():
        clean = clean_verdicts.of(mutant, settings)
        with mutant.patch():
            case = mutant.case()
            verdict = check(case, **settings)
            if located and mutant.stage and not verdict.passed:
                found = _located(case, settings)
                place = mutant.located_by(found)
    where = "" if found is None else f"{found.stage} {found.torch} | {found.jax_source}"
    return Outcome(
        mutant.name,
        case.name,
        not verdict.passed,
        place,
        clean.passed,
        clean_verdicts.runs - before,
        verdict.loss_rel,
        verdict.grad_rel_max,
        "; ".join(clean.faults) or where,
    )


def _located(case: Case, settings: dict[str, Any]) -> Any:
    if settings.get("precision", "").startswith(EXACT):
        return check(case, locate=True, **settings).first_divergence
    return locate(case) or locate(case, steps=settings["steps"])


def clean_runs(mutants: Sequence[Mutant], n: int, seed: int = 0) -> list[Verdict]:
    """Check cases without a bug: every mutant's clean case in turn, each time from another seed.

    Every tenth runs in fp32 or bfloat16, unless the mutant has its own precision.

    Args:
      mutants: The mutants whose clean cases are checked.
      n: Number of runs.
      seed: First seed.

    Returns:
      The verdicts.
    """
    cases: dict[Callable[[], Case], Case] = {}
    verdicts = []
    for i in range(n):
        mutant = mutants[i % len(mutants)]
        low = {"precision": SHORT_OF_FP64[i // 10 % 2], "steps": LOW_STEPS} if i % 10 == 9 else {}
        with mutant.around():
            settings = {"steps": 2, **low, **mutant.settings, "seed": seed + i}
            # One case for all seeds, whose programs are compiled once.
            case = _shared(cases, mutant)
            verdicts.append(check(case, **settings))
    return verdicts


def _shared(cases: dict[Callable[[], Case], Case], mutant: Mutant) -> Case:
    """The clean case of a mutant: a new one where its surroundings change it, else that of its first run."""
    if mutant.around is not nullcontext:
        return mutant.clean()
    if mutant.clean not in cases:
        cases[mutant.clean] = mutant.clean()
    return cases[mutant.clean]


def document(found: Sequence[Outcome], clean: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Return the JSON of `parity mutate --json`: outcomes, and counts over clean runs of mutants and of `clean`."""
    alarms = [not outcome.clean for outcome in found if outcome.clean_runs] + [not verdict.passed for verdict in clean]
    keys = ("name", "case", "caught", "located", "loss_rel", "grad_rel_max")
    return {
        "mutants": [{key: _finite(getattr(outcome, key)) for key in keys} for outcome in found],
        "caught": sum(outcome.caught for outcome in found),
        "total": len(found),
        "clean_runs": len(alarms),
        "false_alarms": sum(alarms),
    }


def main(mutants: Sequence[Mutant], json_path: Path | None, console: "Console", clean: int = 0) -> int:
    """Plant mutants, and print a line for each of them.

    Args:
      mutants: The mutants.
      json_path: File to write the outcomes to.
      console: Where to print.
      clean: Number of additional clean runs.

    Returns:
      Exit status, 1 if a mutant was missed or a clean run raised an alarm.
    """
    start, found = time.perf_counter(), []
    for outcome in outcomes(mutants):
        found.append(outcome)
        place = {None: "", True: ", located", False: ", misplaced"}[outcome.located]
        alarm = "" if outcome.clean else ", false alarm"
        console.print(f"{outcome.name} {'caught' if outcome.caught else 'missed'}{place}{alarm}", markup=False)
    counts = document(found, clean_runs(mutants, clean))
    if json_path is not None:
        json_path.write_text(json.dumps(counts, indent=2, allow_nan=False) + "\n")
    console.print(
        f"{counts['caught']} of {counts['total']} caught, {counts['false_alarms']} false alarms in "
        f"{counts['clean_runs']} clean runs, {time.perf_counter() - start:.0f} s"
    )
    return 0 if counts["caught"] == counts["total"] and not counts["false_alarms"] else 1


def _finite(value: Any) -> Any:
    """The largest float in place of a distance that is not finite, which JSON cannot hold."""
    return value if not isinstance(value, float) or np.isfinite(value) else float(np.finfo(np.float64).max)
