"""One check as the page shows it."""

import linecache
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity.compare.verdict import Verdict, relative
from parity.divergence import Divergence, Line
from parity.report.result import Result
from parity.settings import BF16_PARAMS, EXACT, FP8, Settings, in_double
from parity.source import import_path

Series = Sequence[float] | np.ndarray
"""Numbers in the order of the steps, not necessarily finite."""


@dataclass(frozen=True)
class Excerpt:
    """Lines of a source file from number `first` on; `line` is the number of the relevant one."""

    file: str
    line: int
    first: int
    lines: tuple[str, ...]

    @property
    def numbered(self) -> list[tuple[int, str]]:
        """The lines with their numbers, without common indentation."""
        return list(enumerate(textwrap.dedent("\n".join(self.lines)).split("\n"), start=self.first))


@dataclass(frozen=True)
class Difference:
    """The first operation without a counterpart: PyTorch's `op` in `module`, and the lines of both programs."""

    module: str
    op: str
    torch: Excerpt | None
    jax: Excerpt | None


@dataclass(frozen=True)
class PageCase:
    """One check as the page shows it: settings, verdict and runs.

    The losses have shape [steps], the scales [steps + 1]. `grad_errors` are the relative distances of JAX's first
    gradient from the reference, by parameter in the model's order. The reference is PyTorch in fp64 and the float64
    truth in lower precisions, where `torch_grad_errors` are PyTorch's own distances. `floor` is the rounding of the
    precision, greater than 0. `dropout` is the rate, if one was requested.
    """

    name: str
    precision: str
    optimizer: str
    settings: Settings
    verdict: Verdict
    torch_losses: Series
    jax_losses: Series
    torch_scales: Series
    jax_scales: Series
    grad_errors: Mapping[str, float]
    torch_grad_errors: Mapping[str, float] | None
    floor: float
    difference: Difference | None = None
    dropout: float | None = None
    not_exercised: tuple[str, ...] = ()


def page_case(result: Result) -> PageCase:
    """Return the page's data of a check."""
    ours, theirs, truth = result.examination.ours, result.examination.theirs, result.examination.truth
    return PageCase(
        name=result.case.name,
        precision=result.precision,
        optimizer=result.case.optimizer.name,
        settings=result.settings,
        verdict=result.verdict,
        torch_losses=theirs.losses,
        jax_losses=ours.losses,
        torch_scales=theirs.scales,
        jax_scales=ours.scales,
        grad_errors=relative(ours.grads, truth.grads),
        torch_grad_errors=None if in_double(result.precision) else relative(theirs.grads, truth.grads),
        floor=FLOORS[result.precision],
        difference=_difference(result.verdict.first_divergence),
        dropout=result.dropout,
        not_exercised=result.examination.not_exercised,
    )


FLOORS = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
    "bf16_compute": 2.0**-7,
    **dict.fromkeys(BF16_PARAMS, 2.0**-7),
    **dict.fromkeys(FP8, 2.0**-3),
    **{EXACT + name: 2.0**-52 for name in FP8},
}
"""The distance from 1 to the next number of each precision's matrix products."""


def _difference(found: Divergence | None) -> Difference | None:
    if found is None:
        return None
    module, _, op = found.torch.rpartition(": ")
    return Difference(module, op, excerpt(found.torch_at), excerpt(found.jax_at))


def excerpt(at: Line | None) -> Excerpt | None:
    """Return the lines around a line; none if the file is not available."""
    if at is None:
        return None
    file, number = at
    first, lines = max(number - 3, 1), linecache.getlines(file)
    return Excerpt(import_path(file), number, first, tuple(line.rstrip("\n") for line in lines[first - 1 : number + 2]))
