"""Results as one self-contained HTML page: the verdict first, then each check."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from jaxtrain.folder_files import write_file
from jaxtrain.pages import READOUT, Table, render_page
from parity.report.figures import badness, gradient_chart, loss_chart, number, scale_chart
from parity.report.page_case import PageCase
from parity.report.terminal import bars

_HEADING = ("case", "verdict", "precision", "k", "remat", "loss", "worst gradient", "of", "parameters", "error ratio")


def write_page(path: Path, environment: Mapping[str, Any], cases: Sequence[PageCase]) -> None:
    """Write a self-contained page of the cases, those that differ first."""
    checks = [_check(i, case) for i, case in enumerate(sorted(cases, key=lambda case: case.passed), start=1)]
    verdict = _verdict(cases)
    page = render_page(
        "parity.report",
        "page.html.j2",
        title=f"{verdict} — parity",
        script=READOUT,
        verdict=verdict,
        held=bool(cases) and all(case.passed for case in cases),
        bars=bars(),
        checks=checks,
        table=Table(_HEADING, [check["row"] for check in checks], "All checks", numbers={3, 5, 6, 8, 9}),
        environment={k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in environment.items()},
    )
    write_file(path, page)


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


def _check(i: int, case: PageCase) -> dict[str, Any]:
    scales = [*case.torch_scales, *case.jax_scales]
    held = Markup('<b class="good">✓ held</b>') if case.passed else Markup('<b class="bad">✗ differs</b>')
    ratio = "" if case.error_ratio is None else f"{case.error_ratio:.2f}"
    tensor = case.tensor_worst
    row = (
        Markup('<a href="#check-{}">{}</a>').format(i, case.name),
        *(held, case.precision, case.accumulate, case.remat, number(case.loss_rel), number(case.grad_rel_max)),
        *(case.grad_worst, number(case.param_rel_max), ratio),
    )
    tiles = [
        ("loss", number(case.loss_rel), ""),
        ("worst gradient", number(case.grad_rel_max), case.grad_worst),
        ("parameters", number(case.param_rel_max), ""),
        *([("error, in PyTorch's own", ratio, "")] if ratio else []),
        *([("worst tensor, in PyTorch's own", f"{tensor.ratio:.2f}", tensor.what)] if tensor else []),
    ]
    charts = [
        loss_chart(case) if len(case.torch_losses) or len(case.jax_losses) else None,
        scale_chart(case) if len(set(scales)) > 1 else None,
        gradient_chart(case) if case.grad_errors else None,
    ]
    return {
        "anchor": f"check-{i}",
        "case": case,
        "held": held,
        "row": row,
        "tiles": tiles,
        "charts": [chart for chart in charts if chart],
        "worst": _worst(case),
    }


def _worst(case: PageCase) -> Table:
    """The parameters whose gradients are farthest from the reference."""
    worst = sorted(case.grad_errors, key=lambda name: badness(case.grad_errors[name]), reverse=True)[:5]
    theirs = case.torch_grad_errors
    rows = [
        (
            Markup("<code>{}</code>").format(name),
            number(case.grad_errors[name]),
            *([number(theirs.get(name))] if theirs else []),
        )
        for name in worst
    ]
    heading = (f"worst {len(worst)} of {len(case.grad_errors)}", "JAX", *(["PyTorch"] if theirs else []))
    return Table(heading, rows, "worst gradients", numbers={1, 2})
