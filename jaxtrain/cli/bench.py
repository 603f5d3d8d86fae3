"""`jaxtrain bench FILE.py::NAME`: one's own work, JAX beside PyTorch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxtrain.errors import UserError
from jaxtrain.fields import Bound, field_errors
from jaxtrain.flags import Flag, check_writable, parse


@dataclass(frozen=True)
class Bench:
    """Time training steps of your own work in JAX and in PyTorch, eager and compiled, once they are proved the same.

    The work is a recipe with a side in PyTorch, a function that returns (module, example batch), a `parity.Case`, or a
    run that `jaxtrain port` wrote. First figures come within about a minute; more rounds then narrow the intervals.
    """

    work: Annotated[str, Flag(positional=True, metavar="FILE.py::NAME")] = ""
    """The work."""
    precision: Annotated[str | None, Flag(metavar="P")] = None
    """fp32, tf32, bf16, fp16 or bf16_compute; by default that of a recipe, else fp32."""
    minutes: Annotated[float, Bound(lambda x: x > 0, "be positive and finite"), Flag(metavar="M")] = 3.0
    """Time limit, which is used to its end."""
    json: Annotated[Path | None, Flag(metavar="F")] = None
    """Write the figures, the first ones at once."""
    html: Annotated[Path | None, Flag(metavar="F")] = None
    """Write a page with bars and figures."""
    png: Annotated[Path | None, Flag(metavar="F")] = None
    """Write the chart."""


def main(args: list[str]) -> int:
    """Compare, time, print and write."""
    options = parse(Bench(), args, "jaxtrain bench")
    if wrong := field_errors(options):
        raise UserError(f"--{wrong[0]}")
    for file in (options.json, options.html, options.png):
        check_writable(file)
    from benchmarks.bench import bench  # benchmarks are above jaxtrain, for those who have PyTorch

    budget_s = 60 * options.minutes
    bench(options.work, options.precision, budget_s, json=options.json, html=options.html, png=options.png)
    return 0
