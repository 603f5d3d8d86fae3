"""Results as one self-contained HTML page: the verdict first, then each check."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from jaxtrain.folder_files import write_file
from jaxtrain.pages import READOUT, Chart, Table, render_page
from parity.report.figures import badness, gradient_chart, loss_chart, number, scale_chart
from parity.report.page_case import PageCase
from parity.report.terminal import bars

_HEADING = ("case", "verdict", "precision", "k", "remat", "loss", "worst gradient", "of", "parameters", "error ratio")


class Section(NamedTuple):
    """What was compared besides the cases.

    Attributes:
      title: Its title.
      held: Whether it held.
      lines: What was found.
      chart: A chart of it.
    """

    title: str
    held: bool
    lines: Sequence[str]
    chart: Chart


def write_page(path: Path, environment: Mapping[str, Any], cases: Sequence[PageCase], *sections: Section) -> None:
    """Write a self-contained page of the cases, those that differ first, and of other sections."""
    checks = [_check(i, case) for i, case in enumerate(sorted(cases, key=lambda case: case.verdict.passed), start=1)]
    held = [*(case.verdict.passed for case in cases), *(section.held for section in sections)]
    verdict = _verdict(held)
    page = render_page(
        "parity.report",
        "page.html.j2",
        title=f"{verdict} — parity",
        script=READOUT,
        verdict=verdict,
        held=bool(held) and all(held),
        bars=bars(),
        checks=checks,
        sections=sections,
        table=Table(_HEADING, [check["row"] for check in checks], "All checks", numbers={3, 5, 6, 8, 9}),
        environment={k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in environment.items()},
    )
    write_file(path, page)


def _verdict(held: Sequence[bool]) -> str:
    """The verdict of all checks in one line, of whether each held.

    >>> _verdict([])
    'Nothing was checked'
    >>> _verdict([True, False])
    '1 check held, 1 differs'
    """
    if not held:
        return "Nothing was checked"
    count = sum(held)
    differ = len(held) - count
    return f"{count} check{'s' * (count != 1)} held, {differ or 'none'} differ{'s' * (differ < 2)}"


def _check(i: int, case: PageCase) -> dict[str, Any]:
    verdict, scales = case.verdict, [*case.torch_scales, *case.jax_scales]
    held = Markup('<b class="good">✓ held</b>') if verdict.passed else Markup('<b class="bad">✗ differs</b>')
    ratio, tensor = "" if verdict.error_ratio is None else f"{verdict.error_ratio:.2f}", verdict.worst_tensor
    loss, grad, param = map(number, (verdict.loss_rel, verdict.grad_rel_max, verdict.param_rel_max))
    link = Markup('<a href="#check-{}">{}</a>').format(i, case.name)
    charts = [
        loss_chart(case) if len(case.torch_losses) or len(case.jax_losses) else None,
        scale_chart(case) if len(set(scales)) > 1 else None,
        gradient_chart(case) if case.grad_errors else None,
    ]
    return {
        "anchor": f"check-{i}",
        "case": case,
        "held": held,
        "row": (
            *(link, held, case.precision, case.settings.accumulate, case.settings.remat),
            *(loss, grad, verdict.grad_worst, param, ratio),
        ),
        "faults": [*verdict.faults, *filter(None, (verdict.stage, verdict.unlocated, verdict.diagnosis))],
        "tiles": [
            ("loss", loss, ""),
            ("worst gradient", grad, verdict.grad_worst),
            ("parameters", param, ""),
            *([("error, in PyTorch's own", ratio, "")] if ratio else []),
            *([("worst tensor, in PyTorch's own", f"{tensor.ratio:.2f}", tensor.what)] if tensor else []),
        ],
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
