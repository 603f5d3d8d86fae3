"""`parity selftest`: whether a machine still trains rightly, after an upgrade of JAX or of a driver, in about a minute.

Needs jax, flax, optax, orbax, numpy and rich alone. Nothing here imports JAX before something is on the screen.
"""

import importlib
import importlib.metadata
import json
import math
import platform
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from parity.selftest.check_result import CheckResult

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
CHECKS = (
    "products.products",
    "products.convolutions",
    "step.overflow",
    "step.accumulation",
    "step.rematerialisation",
    "checkpoint.checkpoint",
    "gpt2.determinism",
    "gpt2.precision",
    "collectives.collectives",
)
"""Modules of this package and their checks, in the order of what rests on what."""
STYLES = {True: ("PASS", "green"), False: ("FAIL", "bold red"), None: ("none", "dim")}


def main(console: Console, *, device: str | None = None, file: Path | None = None, debug: bool = False) -> int:
    """Run the checks on JAX's default device, or on the "cpu" or "gpu"; 0 where all passed, else 1.

    `file`: where the findings are written as JSON.
    """
    start = time.perf_counter()
    with console.status("importing JAX"):
        environment, findings = _found(device)
    console.print(", ".join(f"{name} {said}" for name, said in environment.items()), markup=False, soft_wrap=True)
    for finding in findings:
        _tell(console, finding)
    if not findings:
        for check in CHECKS:
            with console.status(check.partition(".")[2]):
                for finding in examine(check, debug=debug):
                    _tell(console, finding)
                    findings.append(finding)
    failed = sum(finding.passed is False for finding in findings)
    passed = sum(finding.passed is True for finding in findings)
    console.print(f"{passed} passed, {failed} failed in {time.perf_counter() - start:.0f} s")
    if file is not None:
        file.write_text(json.dumps(document(environment, findings), indent=2, allow_nan=False) + "\n")
    return 1 if failed else 0


def examine(check: str, *, debug: bool = False) -> Iterator[CheckResult]:
    """The findings of one of CHECKS; what it raises is one more, which fails."""
    module, _, name = check.partition(".")
    try:
        yield from getattr(importlib.import_module(f"{__name__}.{module}"), name)()
    except Exception as error:
        if debug:
            traceback.print_exc()
        said = next(iter(str(error).splitlines()), "")
        yield CheckResult(name, False, f"{type(error).__name__}: {said}")


def document(environment: dict[str, Any], findings: list[CheckResult]) -> dict[str, Any]:
    """What `--json` writes; a figure that is not finite is null.

    >>> document({}, [CheckResult("product", True, "", 0.5, 1.0)])["checks"]
    [{'name': 'product', 'passed': True, 'figure': 0.5, 'bound': 1.0, 'said': ''}]
    """
    checks = [
        {"name": f.name, "passed": f.passed, "figure": _finite(f.figure), "bound": f.bound, "said": f.said}
        for f in findings
    ]
    counts = {"passed": sum(f.passed is True for f in findings), "failed": sum(f.passed is False for f in findings)}
    return {"environment": environment, "checks": checks, **counts}


def _found(device: str | None) -> tuple[dict[str, Any], list[CheckResult]]:
    """Versions and devices, and what is amiss with them."""
    import jax

    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    environment: dict[str, Any] = {"python": platform.python_version()}
    environment |= {package: importlib.metadata.version(package) for package in PACKAGES}
    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a plugin that does not load, or a driver that does not answer
        return environment, [CheckResult("devices", False, next(iter(str(error).splitlines()), ""))]
    environment["devices"] = [f"{one.platform}: {one.device_kind}" for one in devices]
    environment["runtime"] = " ".join(devices[0].client.platform_version.split())
    if device not in (None, devices[0].platform):
        said = f"no {device} answers JAX, only {devices[0]}: jaxtrain doctor says why"
        return environment, [CheckResult("devices", False, said)]
    return environment, []


def _tell(console: Console, finding: CheckResult) -> None:
    status, style = STYLES[finding.passed]
    line = Text.assemble((status, style), f"  {finding.name:26}  {finding.said}")
    console.print(line, soft_wrap=True)


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None
