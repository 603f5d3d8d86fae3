"""Distances and verdicts: whether two runs mean the same, and whether they are as precise as each other.

No tolerance is taken from the caller. In float64 the bars leave room for rounding and for nothing else. In lower
precisions PyTorch itself is the measure: its own distance to the float64 truth.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parity.record import Record, Tensors

FIRST_BAR = 1e-10
"""Relative distance in float64 up to the end of the first step: rounding is 1e-16, a wrong epsilon 1e-6."""
LAST_BAR = 1e-8
"""The same after more steps, each of which feeds on the roundings of those before."""
NEGLIGIBLE = 1e-12
"""A tensor of so small a part of the whole's norm may be zero in mathematics (the gradient of an attention key
bias) and rounding noise in fact: it is judged on the scale of the whole."""
RATIO_BAR = 2.0
"""How far from the truth, in units of PyTorch's own distance, a low-precision run may be: the factor that PyTorch's
compiler tests allow a compiled model (`torch/_dynamo/utils.py`, `same`)."""


@dataclass(frozen=True)
class Verdict:
    """Whether JAX's run is PyTorch's, and by how much it is not.

    Relative distances to PyTorch's run: `loss_rel`, the worst of the steps; `grad_rel_max`, the worst gradient fed to
    the first update, which is that of `grad_worst`; `param_rel_max`, the worst parameter after the last step.
    `error_ratio`, None in float64: the distance to the float64 truth over PyTorch's own, the worst of losses, first
    gradient and last parameters. `faults`: a line for each thing that failed.
    """

    loss_rel: float
    grad_rel_max: float
    grad_worst: str
    param_rel_max: float
    error_ratio: float | None
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.faults


def same_meaning(ours: Record, theirs: Record) -> Verdict:
    """The verdict on two float64 runs: every loss, gradient, parameter and moment is within the bars."""
    return _verdict(ours, theirs, None, [*_apart(ours, theirs)])


def same_precision(ours: Record, theirs: Sequence[Record], truth: Record) -> Verdict:
    """The verdict on low-precision runs: ours is at most twice as far from the `truth` as theirs are.

    `theirs`: runs of the same mathematics rounded differently, the plain one first. The farthest of them is the
    measured noise of the precision. All must have overflowed at the same steps, and moved the loss scale alike.
    """
    ratios = {
        what: _ratio(_rms(our, true), max(_rms(other, true) for other in others))
        for (what, our), others, true in zip(
            _judged(ours).items(),
            zip(*(_judged(other).values() for other in theirs), strict=True),
            _judged(truth).values(),
            strict=True,
        )
    }
    faults = [
        f"{what}: {ratio:.3g} times as far from the float64 truth as PyTorch's, over {RATIO_BAR:g}"
        for what, ratio in ratios.items()
        if ratio > RATIO_BAR
    ]
    for step in np.flatnonzero(ours.scales != theirs[0].scales)[:1]:
        faults.append(f"loss scale after {step} steps: {ours.scales[step]:g}, PyTorch's {theirs[0].scales[step]:g}")
    return _verdict(ours, theirs[0], max(ratios.values()), faults)


def relative(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """‖ours − theirs‖ / ‖theirs‖ of each tensor; infinite where either is not finite.

    Raises `ValueError` where they are not the same tensors by name.

    >>> relative({"w": np.array([1.0]), "zero": np.array([1e-17])}, {"w": np.array([2.0]), "zero": np.array([0.0])})
    {'w': 0.5, 'zero': 5e-18}
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"in one of the runs only: {sorted(ours.keys() ^ theirs.keys())}")
    whole = _norm(theirs.values())
    return {name: _ratio(_norm([_minus(ours[name], x)]), _scale(_norm([x]), whole)) for name, x in theirs.items()}


def _verdict(ours: Record, theirs: Record, error_ratio: float | None, faults: Sequence[str]) -> Verdict:
    _, loss_rel = _worst(relative(_losses(ours), _losses(theirs)))
    grad_worst, grad_rel = _worst(relative(ours.grads, theirs.grads))
    _, param_rel = _worst(relative(ours.last.params, theirs.last.params))
    return Verdict(loss_rel, grad_rel, grad_worst, param_rel, error_ratio, tuple(faults))


def _apart(ours: Record, theirs: Record) -> Iterator[str]:
    """A line for each group of tensors of which one is farther apart than its bar."""
    last_bar = FIRST_BAR if len(theirs.losses) == 1 else LAST_BAR
    groups = {
        "loss": (FIRST_BAR, _losses(ours, 1), _losses(theirs, 1)),
        "gradient": (FIRST_BAR, ours.grads, theirs.grads),
        "later loss": (last_bar, _losses(ours), _losses(theirs)),
    }
    for field in ("params", "mu", "nu"):
        groups[f"{field} after the first update"] = (
            FIRST_BAR,
            getattr(ours.first, field),
            getattr(theirs.first, field),
        )
        groups[f"{field} after the last step"] = (last_bar, getattr(ours.last, field), getattr(theirs.last, field))
    for what, (bar, our, their) in groups.items():
        name, distance = _worst(relative(our, their))
        if not distance <= bar:
            yield f"{what}, {name}: {distance:.1e} apart, over {bar:.0e}"


def _losses(record: Record, steps: int | None = None) -> Tensors:
    return {f"step {i}": loss for i, loss in enumerate(record.losses[:steps], start=1)}


def _judged(record: Record) -> dict[str, Tensors]:
    return {"losses": _losses(record), "first gradient": record.grads, "last parameters": record.last.params}


def _worst(distances: dict[str, float]) -> tuple[str, float]:
    return max(distances.items(), key=lambda item: item[1])


def _rms(run: Tensors, truth: Tensors) -> float:
    return _norm(_minus(run[name], x) for name, x in truth.items()) / math.sqrt(sum(x.size for x in truth.values()))


def _scale(norm: float, whole: float) -> float:
    return whole if norm <= NEGLIGIBLE * whole else norm


def _ratio(distance: float, unit: float) -> float:
    if not (math.isfinite(distance) and math.isfinite(unit)):
        return math.inf
    return distance / unit if unit else (math.inf if distance else 0.0)


def _minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.subtract(a, b, dtype=np.float64)


def _norm(tensors: Iterable[np.ndarray]) -> float:
    with np.errstate(over="ignore"):
        return math.sqrt(sum(float(np.vdot(x, x)) for x in map(np.float64, tensors)))
