"""The third stage: long runs in float32 from several seeds, beside the noise of PyTorch's own float32.

The rule. For each seed, PyTorch trains in float64, the truth, and in float32: as it is, over permuted rows, from
weights one ulp off, and with a bias correction in float32 (`parity.verify.noise`). The curves of the losses are means
over windows of updates. The distance of a run is the root mean square difference of its curve from the truth's, and
JAX's may be at most twice that of the farthest of PyTorch's float32 runs, as the median of the seeds. Where rounding is
amplified, PyTorch's runs are as far apart as JAX's, and what is within their distance cannot be told from rounding;
where it is not, a schedule that ends at another update or a running average that drifts is many times as far.
"""

from collections.abc import Sequence

import numpy as np

from parity.bars import FEW_ULPS, RATIO_BAR
from parity.settings import Settings
from parity.verify.contract import Target
from parity.verify.difference import Difference, Held
from parity.verify.noise import reference
from parity.verify.port_program import PortProgram
from parity.verify.source_case import SourceCase

STAGE = "behaviour"
UPDATES = 200
SEEDS = 3
WINDOW = 10
"""Updates of a point of the curve."""


def behaviour(case: SourceCase, target: Target, seed: int) -> Difference | Held:
    """Compare long runs.

    Args:
      case: The source.
      target: The port.
      seed: The first seed.

    Returns:
      The difference, or what holds.
    """
    program = PortProgram(target, "fp32")
    runs = [_ratio(case, program, seed + i) for i in range(SEEDS)]
    ratio, update = sorted(runs, key=lambda run: run[0])[SEEDS // 2]
    figures = {f"seed {i}": found for i, (found, _) in enumerate(runs, start=1)}
    rule = f"times as far from float64 as PyTorch's float32 runs, the median of {SEEDS} seeds"
    if ratio <= RATIO_BAR:
        return Held(f"{case.most(UPDATES)} updates: losses {ratio:.2f} {rule}", figures)
    found = f"the losses of {case.most(UPDATES)} updates are {ratio:.3g} {rule}"
    what = f"{found}, over {RATIO_BAR:g}; farthest at update {update}"
    return Difference(STAGE, what, "loss", ("loss",), update, ratio, RATIO_BAR)


def _ratio(case: SourceCase, program: PortProgram, seed: int) -> tuple[float, int]:
    """Return JAX's distance in units of the farthest of PyTorch's runs, and the end of the window where it is largest.

    The farthest of PyTorch's is no less than the rounding of a loss.
    """
    settings = Settings(steps=case.most(UPDATES), seed=seed)
    theirs = reference(case, settings)
    ours = program.run(case, theirs.weights, steps=settings.steps, seed=seed)
    truth = theirs.truth.losses
    runs = [theirs.theirs, *theirs.reordered, *theirs.one_ulp]
    unit = max(least(truth), *(distance(run.losses, truth)[0] for run in runs))
    apart, update = distance(ours.losses, truth)
    return apart / unit, update


def distance(losses: Sequence[float] | np.ndarray, reference: Sequence[float] | np.ndarray) -> tuple[float, int]:
    """Return the distance of a curve from another one, and the end of the window where it is largest."""
    apart = curve(losses) - curve(reference)
    apart = np.where(np.isfinite(apart), apart, np.inf)
    return _rms(apart), min(WINDOW * (int(np.argmax(np.abs(apart))) + 1), len(losses))


def least(losses: Sequence[float] | np.ndarray) -> float:
    """Return the least distance of two curves that means anything: the rounding of a loss."""
    return FEW_ULPS * _rms(curve(losses))


def curve(losses: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return losses as means over windows, of which the last may be shorter, float64[windows]."""
    starts = range(0, len(losses), WINDOW)
    return np.array([np.mean(losses[start : start + WINDOW], dtype=np.float64) for start in starts])


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
