"""One's own work as a workload: a recipe, a module with an example, a case, or a run that `jaxtrain port` wrote.

`python -m benchmarks.own_work FILE.py::NAME` checks in a process of its own that both frameworks do the same work.
"""

import contextlib
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from json import dumps
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.workloads import WORKLOADS, Workload
from jaxtrain.errors import RunFailed, UserError
from parity.case import Case

STEPS = 3
"""Updates that must be the same: the second and third depend on gradients and updates before them."""
RECORDED = 20
"""Updates of a script that are recorded, as by `jaxtrain port`: fewer may end before its scheduler steps."""


@dataclass(frozen=True)
class Facts:
    """What is known of one's own work before it is timed.

    Attributes:
      name: Its name.
      difference: What differs between the frameworks; "" if they do the same work.
      precision: The precision of the run; "fp32" if it is no run.
      accumulate: Micro-batches of an update.
      has_loop: Whether its program has a loop over layers, which can be unrolled.
      largest: The largest relative difference of a loss, a gradient and a parameter in float64.
      not_exercised: Lines on what the comparison leaves out.
    """

    name: str
    difference: str
    precision: str
    accumulate: int
    has_loop: bool
    largest: float
    not_exercised: list[str] = field(default_factory=list)


def workload_of(name: str) -> Workload:
    """Return a workload of the suites by its name, or one's own, `path/to/file.py::NAME`."""
    return own_workload(name) if "::" in name else WORKLOADS[name]


@cache
def own_workload(name: str) -> Workload:
    """Return one's own work: a recipe, a module with an example, a case, or a run that `jaxtrain port` wrote.

    Args:
      name: `path/to/file.py::NAME`.

    Raises:
      UserError: There is nothing of that name, or it has no side in PyTorch.
    """
    from parity.weights import completed

    case, unit, per_row = _case(name)
    case, _ = completed(case)
    return Workload(lambda **_: case, {"rows": case.rows, "length": per_row}, unit, model="")


def _case(name: str) -> tuple[Case, str, int]:
    """Return a case, the name of what it computes on, and how many of it a row has."""
    from jaxtrain.user_file import import_file
    from parity.cases.own import is_recipe, own_case

    path, _, attribute = name.rpartition("::")
    if not Path(path).is_file():
        raise UserError(f"there is no file {path!r}: name a recipe, a module or a case as path/to/file.py::NAME")
    module = import_file(Path(path))
    found: Any = getattr(module, attribute, None)
    if not is_recipe(found):
        return own_case(name), "examples", 1
    case = _ported(module, Path(path), attribute) if _is_ported(module) else own_case(name)
    task = found().task()
    return case, task.unit, task.units_per_row


def _is_ported(module: ModuleType) -> bool:
    """Return whether a file was written by `jaxtrain port`."""
    return hasattr(module, "SCRIPT") and hasattr(module, "ARGS") and hasattr(module, "port")


def _ported(module: Any, path: Path, name: str) -> Case:
    """Record the script of a ported run again, and return the case of both."""
    from jaxtrain.port.data import keep_loaders
    from jaxtrain.port.kept_files import kept_files
    from jaxtrain.port.ported import ported
    from jaxtrain.port.script import record
    from jaxtrain.port.understand import understood
    from parity.ported import ported_case

    with tempfile.TemporaryDirectory() as kept, kept_files(Path(kept)), contextlib.redirect_stdout(sys.stderr):
        recording = record(module.SCRIPT, module.ARGS, RECORDED)
    keep_loaders(module.SCRIPT, module.ARGS, [found.loader for found in recording.loaders])
    return ported_case(ported(understood(recording)), path.parent, name)


def facts(name: str) -> Facts:
    """Compare the first updates of both frameworks in float64."""
    import jax

    from parity.compare.verdict import Verdict
    from parity.run import examine
    from parity.settings import settings_of

    case = own_workload(name).case({})
    steps = min(STEPS, case.settings.get("steps", STEPS))
    verdict: Verdict = examine(case, "fp64", steps=steps).verdict
    loss: Any = case.loss_fn
    arguments = [case.params_like, case.batch(0, case.rows), jax.random.key(0)]
    arguments += [] if case.state_like is None else [case.state_like]
    with jax.numpy_dtype_promotion("standard"):
        program = str(jax.make_jaxpr(loss)(*arguments))
    found = examine(case, "fp64", locate=True, steps=steps) if not verdict.passed else None
    return Facts(
        name=case.name,
        difference="" if found is None else _difference(case.name, found.verdict),
        precision=case.precision or "fp32",
        accumulate=settings_of(case).accumulate,
        has_loop="scan[" in program,
        largest=max(verdict.loss_rel, verdict.grad_rel_max, verdict.param_rel_max),
        not_exercised=[*case.not_exercised],
    )


def _difference(name: str, verdict: Any) -> str:
    """Return in one line which tensor differs, and where."""
    where = verdict.stage or verdict.diagnosis or verdict.unlocated
    tensor = f" (largest in the gradient of {verdict.grad_worst})" if verdict.grad_worst else ""
    reason = f"{verdict.faults[0]}{tensor}" + (f"; {where}" if where else "")
    return f"{name}: JAX and PyTorch do different work, so that times would mean nothing: {reason}"


if __name__ == "__main__":
    try:
        print(dumps(asdict(facts(sys.argv[1]))), flush=True)
    except RunFailed:
        raise
    except UserError as wrong:
        print(dumps({"wrong": str(wrong)}), flush=True)
