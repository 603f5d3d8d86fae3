"""The results as JSON, with the machine and the versions they were got on."""

import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from typing import Any

from parity.report.result import Result

PACKAGES = ("jax", "jaxlib", "torch", "transformers", "flax", "optax")


def document(results: Sequence[Result]) -> dict[str, Any]:
    """What `parity run --json` writes. A distance that is not finite is null, and its case has not passed."""
    passed = sum(result.verdict.passed for result in results)
    return {
        "environment": environment(),
        "cases": [_row(result) for result in results],
        "passed": passed,
        "failed": len(results) - passed,
    }


def environment() -> dict[str, Any]:
    """The machine, the versions, and the settings that a number may depend on."""
    import jax
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **{package: _version(package) for package in PACKAGES},
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "torch_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch_threads": torch.get_num_threads(),
    }


def _row(result: Result) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "name": result.case.name,
        "precision": result.precision,
        "accumulate": result.accumulate,
        "remat": result.remat,
        "dropout": result.dropout,
        "optimizer": type(result.case.optimizer).__name__,
        "steps": result.steps,
        "seed": result.seed,
        "passed": verdict.passed,
        "loss_rel": _finite(verdict.loss_rel),
        "grad_rel_max": _finite(verdict.grad_rel_max),
        "grad_worst": verdict.grad_worst,
        "param_rel_max": _finite(verdict.param_rel_max),
        "error_ratio": _finite(verdict.error_ratio),
        "first_divergence": None,
    }


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
