"""`parity selftest`: check in about a minute that a machine trains correctly, e.g. after an upgrade of JAX or a driver.

It requires only jax, flax, optax, orbax, numpy and rich. JAX is imported after the first line of output.
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
    "compiler_check.programs",
    "products_check.products",
    "products_check.convolutions",
    "step_check.overflow",
    "step_check.accumulation",
    "step_check.rematerialization",
    "checkpoint_check.checkpoint",
    "gpt2_check.determinism",
    "gpt2_check.precision",
    "collectives_check.collectives",
)
"""Modules of this package and their checks, each after those it depends on."""
STYLES = {True: ("PASS", "green"), False: ("FAIL", "bold red"), None: ("none", "dim")}


def main(console: Console, *, device: str | None = None, file: Path | None = None, debug: bool = False) -> int:
    """Run the checks and print their results.

    Args:
      console: Where to print.
      device: "cpu" or "gpu"; None for JAX's default device.
      file: File to write the results to, as JSON.
      debug: Whether to print tracebacks.

    Returns:
      Exit status, 0 if no check failed, else 1.
    """
    start = time.perf_counter()
    with console.status("importing JAX"):
        environment, results = _environment(device)
    console.print(", ".join(f"{name} {value}" for name, value in environment.items()), markup=False, soft_wrap=True)
    for result in results:
        _print(console, result)
    if not results:
        for check in CHECKS:
            with console.status(check.partition(".")[2]):
                for result in examine(check, debug=debug):
                    _print(console, result)
                    results.append(result)
    failed = sum(result.passed is False for result in results)
    passed = sum(result.passed is True for result in results)
    console.print(f"{passed} passed, {failed} failed in {time.perf_counter() - start:.0f} s")
    if file is not None:
        file.write_text(json.dumps(document(environment, results), indent=2, allow_nan=False) + "\n")
    return 1 if failed else 0


def examine(check: str, *, debug: bool = False) -> Iterator[CheckResult]:
    """Yield the results of one of `CHECKS`; an exception is a result that fails."""
    module, _, name = check.partition(".")
    try:
        yield from getattr(importlib.import_module(f"{__name__}.{module}"), name)()
    except Exception as error:
        if debug:
            traceback.print_exc()
        message = next(iter(str(error).splitlines()), "")
        yield CheckResult(name, False, f"{type(error).__name__}: {message}")


def document(environment: dict[str, Any], results: list[CheckResult]) -> dict[str, Any]:
    """Return the document of `--json`; a figure that is not finite is null.

    >>> document({}, [CheckResult("product", True, "", 0.5, 1.0)])["checks"]
    [{'name': 'product', 'passed': True, 'figure': 0.5, 'bound': 1.0, 'detail': ''}]
    """
    checks = [
        {"name": f.name, "passed": f.passed, "figure": _finite(f.figure), "bound": f.bound, "detail": f.detail}
        for f in results
    ]
    counts = {"passed": sum(f.passed is True for f in results), "failed": sum(f.passed is False for f in results)}
    return {"environment": environment, "checks": checks, **counts}


def _environment(device: str | None) -> tuple[dict[str, Any], list[CheckResult]]:
    """Versions and devices, and failures of them."""
    import jax

    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    environment: dict[str, Any] = {"python": platform.python_version()}
    environment |= {package: importlib.metadata.version(package) for package in PACKAGES}
    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a plugin that does not load, or a driver that does not respond
        return environment, [CheckResult("devices", False, next(iter(str(error).splitlines()), ""))]
    environment["devices"] = [f"{one.platform}: {one.device_kind}" for one in devices]
    environment["runtime"] = " ".join(devices[0].client.platform_version.split())
    if device not in (None, devices[0].platform):
        detail = f"JAX found no {device}, only {devices[0]}: run jaxtrain doctor"
        return environment, [CheckResult("devices", False, detail)]
    return environment, []


def _print(console: Console, result: CheckResult) -> None:
    status, style = STYLES[result.passed]
    line = Text.assemble((status, style), f"  {result.name:26}  {result.detail}")
    console.print(line, soft_wrap=True)


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None
