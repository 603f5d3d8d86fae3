"""Known bugs, planted one at a time, to prove that the harness sees them; and clean runs, that it sees no others."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.compare import Verdict
from parity.locate import locate
from parity.run import check

if TYPE_CHECKING:
    from rich.console import Console

    from parity.mutants import Mutant

STEPS = 4
"""What some bugs do shows in the second step only, or in the third."""
SHORT_OF_FP64 = ("fp32", "bf16")


@dataclass(frozen=True)
class Outcome:
    """What the harness said of a mutant.

    `caught`: that it differs; `located`: in the right place, None where a place is not planted or was not asked for;
    `clean`: that it does not differ without the bug. `loss_rel` and `grad_rel_max` are the verdict's.
    """

    name: str
    case: str
    caught: bool
    located: bool | None
    clean: bool
    loss_rel: float
    grad_rel_max: float
    found: str = ""


def mutate(names: Sequence[str] | None = None, located: bool = True) -> list[Outcome]:
    """The outcomes of the mutants named, or of all. Raises `UserError` for a name that is none."""
    return list(outcomes(names, located))


def outcomes(names: Sequence[str] | None = None, located: bool = True) -> Iterator[Outcome]:
    """The same, one by one."""
    from jaxtrain.errors import UserError
    from parity.mutants import MUTANTS

    unknown = [name for name in names or () if name not in MUTANTS]
    if unknown:
        raise UserError(f"no mutant {', '.join(unknown)}: choose from {', '.join(MUTANTS)}")
    for name in names or MUTANTS:
        yield _outcome(MUTANTS[name], located)


def _outcome(mutant: "Mutant", located: bool) -> Outcome:
    settings = {"steps": STEPS, **mutant.settings}
    place, found = None, None
    with mutant.around():
        clean = check(mutant.clean(), **settings)
        with mutant.patch():
            case = mutant.case()
            verdict = check(case, **settings)
            if located and mutant.stage and not verdict.passed:
                found = locate(case) or locate(case, steps=settings["steps"])
                place = mutant.located_by(found)
    where = "" if found is None else f"{found.stage} {found.torch} | {found.jax_source}"
    return Outcome(
        mutant.name,
        case.name,
        not verdict.passed,
        place,
        clean.passed,
        verdict.loss_rel,
        verdict.grad_rel_max,
        "; ".join(clean.faults) or where,
    )


def clean_runs(n: int, seed: int = 0) -> list[Verdict]:
    """Verdicts on `n` cases in which nothing is planted: every mutant's clean one in turn, each time from another seed.

    Every tenth is in fp32 or bfloat16 where a mutant is not of a precision of its own.
    """
    from parity.mutants import MUTANTS

    mutants = list(MUTANTS.values())
    verdicts = []
    for i in range(n):
        mutant = mutants[i % len(mutants)]
        low = {"precision": SHORT_OF_FP64[i // 10 % 2]} if i % 10 == 9 else {}
        with mutant.around():
            settings = {"steps": 2, **low, **mutant.settings, "seed": seed + i}
            verdicts.append(check(mutant.clean(), **settings))
    return verdicts


def document(found: Sequence[Outcome], clean: Sequence[Verdict] = ()) -> dict[str, Any]:
    """What `parity mutate --json` writes; every mutant's own clean case is a clean run too. No number is infinite."""
    alarms = [not outcome.clean for outcome in found] + [not verdict.passed for verdict in clean]
    keys = ("name", "case", "caught", "located", "loss_rel", "grad_rel_max")
    return {
        "mutants": [{key: _finite(getattr(outcome, key)) for key in keys} for outcome in found],
        "caught": sum(outcome.caught for outcome in found),
        "total": len(found),
        "clean_runs": len(alarms),
        "false_alarms": sum(alarms),
    }


def main(names: Sequence[str], json_path: Path | None, console: "Console", clean: int = 0) -> int:
    """`parity mutate`: a line a mutant, and the exit status, 1 where one was missed or a clean run raised an alarm."""
    start, found = time.perf_counter(), []
    for outcome in outcomes(names or None):
        found.append(outcome)
        place = {None: "", True: ", located", False: ", misplaced"}[outcome.located]
        alarm = "" if outcome.clean else ", false alarm"
        console.print(f"{outcome.name} {'caught' if outcome.caught else 'missed'}{place}{alarm}", markup=False)
    said = document(found, clean_runs(clean))
    if json_path is not None:
        json_path.write_text(json.dumps(said, indent=2, allow_nan=False) + "\n")
    console.print(
        f"{said['caught']} of {said['total']} caught, {said['false_alarms']} false alarms in {said['clean_runs']} "
        f"clean runs, {time.perf_counter() - start:.0f} s"
    )
    return 0 if said["caught"] == said["total"] and not said["false_alarms"] else 1


def _finite(value: Any) -> Any:
    """A distance that is no number as the largest one, as JSON has no other."""
    return value if not isinstance(value, float) or np.isfinite(value) else float(np.finfo(np.float64).max)
