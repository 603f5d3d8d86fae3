"""Results as one self-contained HTML page: the verdict first, then each check."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from parity.report.figures import LEVELS, badness, gradient_figure, legend, loss_figure, number, scale_figure
from parity.report.page_case import PageCase
from parity.report.terminal import bars


def write_page(path: Path, environment: Mapping[str, Any], cases: Sequence[PageCase]) -> None:
    """Write a self-contained page of the cases, those that differ first."""
    jinja = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["number"] = number
    template = jinja.from_string(resources.files("parity.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        verdict=_verdict(cases),
        held=bool(cases) and all(case.passed for case in cases),
        bars=bars(),
        checks=[_check(i, case) for i, case in enumerate(sorted(cases, key=lambda case: case.passed), start=1)],
        levels=LEVELS,
        environment={k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in environment.items()},
    )
    partial = path.with_suffix(".partial")
    # A name may not be valid Unicode: a file name may contain a lone surrogate.
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.replace(path)


def _verdict(cases: Sequence[PageCase]) -> str:
    """The verdict of all cases in one line.

    >>> _verdict([])
    'Nothing was checked'
    """
    if not cases:
        return "Nothing was checked"
    held = sum(case.passed for case in cases)
    differ = len(cases) - held
    return f"{held} check{'s' * (held != 1)} held, {differ or 'none'} differ{'s' * (differ < 2)}"


def _check(number: int, case: PageCase) -> dict[str, Any]:
    scales = [*case.torch_scales, *case.jax_scales]
    return {
        "anchor": f"check-{number}",
        "case": case,
        "losses": loss_figure(case) if len(case.torch_losses) or len(case.jax_losses) else None,
        "gradients": gradient_figure(case) if case.grad_errors else None,
        "legend": legend(case),
        "worst": sorted(case.grad_errors, key=lambda name: badness(case.grad_errors[name]), reverse=True)[:5],
        "scales": scale_figure(case) if len(set(scales)) > 1 else None,
    }
