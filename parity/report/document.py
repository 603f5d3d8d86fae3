"""Results as JSON, with the machine and the versions that produced them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parity.attestation import environment
from parity.compare.trajectory import Trajectory
from parity.report.result import Result


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Return the document of `parity run --json`. A distance that is not finite is null, and its case fails."""
    return document_of_rows([row(result) for result in results])


def document_of_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a document of rows, with the environment and the counts."""
    passed = sum(row["passed"] for row in rows)
    return {"environment": environment(), "cases": [*rows], "passed": passed, "failed": len(rows) - passed}


def row(result: Result) -> dict[str, Any]:
    """Return one check as a row of the document."""
    verdict, first, course = result.verdict, result.verdict.first_divergence, result.verdict.trajectory
    worst = verdict.worst_tensor
    return {
        "name": result.case.name,
        "precision": result.precision,
        "accumulate": result.settings.accumulate,
        "remat": result.settings.remat,
        "dropout": result.dropout,
        "optimizer": result.case.optimizer.name,
        "steps": result.settings.steps,
        "seed": result.settings.seed,
        "passed": verdict.passed,
        "loss_rel": _finite(verdict.loss_rel),
        "grad_rel_max": _finite(verdict.grad_rel_max),
        "grad_worst": verdict.grad_worst,
        "param_rel_max": _finite(verdict.param_rel_max),
        "error_ratio": _finite(verdict.error_ratio),
        "tensor_worst": None if worst is None else worst.what,
        "tensor_ratio": None if worst is None else _finite(worst.ratio),
        "first_divergence": None if first is None else {"torch": first.torch, "jax_source": first.jax_source},
        "stage": verdict.stage,
        "diagnosis": verdict.diagnosis,
        "unlocated": verdict.unlocated,
        "faults": list(verdict.faults),
        "notes": list(result.examination.notes),
        "not_exercised": list(result.examination.not_exercised),
        "trajectory": None if course is None else _course(course),
    }


def _course(course: Trajectory) -> dict[str, Any]:
    """Relative distances of the losses, float[steps], each the largest so far; steps are counted from 1."""
    return {
        "chaos": course.chaos,
        "parted": course.parted,
        "apart": _all(course.apart),
        "one_ulp": _all(course.one_ulp),
    }


def _all(series: np.ndarray) -> list[float | None]:
    return [_finite(float(x)) for x in series]


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None
