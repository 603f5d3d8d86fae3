"""PyTorch's float32 runs, by which a port in float32 is measured.

Beside the runs of every check in float32 there is one whose learning rate is off by as much as Adam's bias correction
is in float32: `1 - 0.999**t`, which PyTorch computes in float64 and optax does not.
"""

from dataclasses import replace

from parity.compare.reference import Reference, live_reference
from parity.settings import Settings
from parity.sides import torch_side
from parity.verify.source_case import SourceCase

BIAS_CORRECTION = 6e-5
"""Largest relative rounding error of `1 - 0.999**t` in float32: that of 0.999, in units of the first difference."""


def reference(case: SourceCase, settings: Settings) -> Reference:
    """Return PyTorch's side in float32, with its noise in `reordered`."""
    live = live_reference(case, "fp32", settings)
    off = replace(case, rate=1 + BIAS_CORRECTION)
    faster = torch_side.run(off, "fp32", steps=settings.steps, seed=settings.seed)
    return replace(live, reordered=[*(live.reordered or live.one_ulp), faster])
