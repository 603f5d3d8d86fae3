"""Distances and verdicts: whether two runs mean the same, and whether they are as precise as each other.

No tolerance is taken from the caller. In float64 the bars leave room for rounding and for nothing else. In lower
precisions PyTorch itself is the measure: its own distance to the float64 truth.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.bars import FIRST_BAR, LAST_BAR, NEGLIGIBLE, RATIO_BAR, SINGLE
from parity.divergence import Divergence
from parity.record import Record, Snapshot, Tensors
from parity.trajectory import JUDGED, Trajectory, trajectory


@dataclass(frozen=True)
class Verdict:
    """Whether JAX's run is PyTorch's, and by how much it is not.

    Relative distances to PyTorch's run: `loss_rel`, the worst of the steps; `grad_rel_max`, the worst gradient fed to
    the first update, which is that of `grad_worst`; `param_rel_max`, the worst parameter after the last step.
    `error_ratio`, None in float64: the distance to the float64 truth over PyTorch's own, the worst of losses, first
    gradient and last parameters. `faults`: a line for each thing that failed. If asked for, `stage`: the one at
    fault, `first_divergence`: where, `unlocated`: why that cannot be said, and `diagnosis`: the convention that
    explains it, and the change to make. `trajectory`: the steps beside PyTorch's from weights one ulp off.
    """

    loss_rel: float
    grad_rel_max: float
    grad_worst: str
    param_rel_max: float
    error_ratio: float | None
    faults: tuple[str, ...]
    first_divergence: Divergence | None = None
    stage: str | None = None
    diagnosis: str | None = None
    unlocated: str | None = None
    trajectory: Trajectory | None = field(default=None, compare=False)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.faults

    @property
    def lines(self) -> list[str]:
        """What failed, and where, a line each."""
        found = self.first_divergence
        where = {"stage": self.stage, "in PyTorch": found and found.torch, "in JAX": found and found.jax_source}
        where |= {"not located": self.unlocated, "diagnosis": self.diagnosis}
        return [*self.faults, *(f"{what}: {said}" for what, said in where.items() if said)]


def same_meaning(ours: Record, theirs: Record, one_ulp: Sequence[Record] = (), judged: int = JUDGED) -> Verdict:
    """The verdict on two float64 runs: every loss, gradient, parameter and moment is within the bars.

    `one_ulp`: PyTorch's runs from weights one ulp off. Where they are given, what comes after the first `judged` steps
    may be as far apart as twice their noise (`Trajectory.noise`), where that is more than the bar.
    """
    course = _course(ours, theirs, one_ulp, LAST_BAR)
    faults = [*_apart(ours, theirs, one_ulp, course, judged)]
    return replace(_verdict(ours, theirs, theirs, None, faults), trajectory=course)


def same_precision(ours: Record, theirs: Sequence[Record], truth: Record, one_ulp: Sequence[Record] = ()) -> Verdict:
    """The verdict on low-precision runs: ours is at most twice as far from the `truth` as theirs are.

    `theirs`: runs of the same mathematics rounded differently, the plain one first. The farthest of them is the
    measured noise of the precision. All must have overflowed at the same steps, and moved the loss scale alike.
    `one_ulp`: PyTorch's runs from weights one ulp off, for the trajectory. Where they are as far from its plain run as
    that is from the truth, one of them may by chance be twice as far: there the ratio says nothing more.
    """
    errors = [_errors(run, truth) for run in theirs]
    ratios = {what: _ratio(e, max(other[what] for other in errors)) for what, e in _errors(ours, truth).items()}
    faults = [
        f"{what}: {ratio:.3g} times as far from the float64 truth as PyTorch's, over {RATIO_BAR:g}"
        for what, ratio in ratios.items()
        if ratio > RATIO_BAR
    ]
    for step in np.flatnonzero(ours.scales != theirs[0].scales)[:1]:
        faults.append(f"loss scale after step {step}: {ours.scales[step]:g}, PyTorch's {theirs[0].scales[step]:g}")
    own = np.maximum.accumulate(_along(theirs[0], truth))
    course = _course(ours, theirs[0], one_ulp, (RATIO_BAR - 1) * np.maximum(own, SINGLE))
    return replace(_verdict(ours, theirs[0], truth, max(ratios.values()), faults), trajectory=course)


def median(verdicts: Sequence[Verdict]) -> Verdict:
    """The middle one, from the best to the worst."""
    return sorted(verdicts, key=lambda v: (not v.passed, v.error_ratio or 0.0))[len(verdicts) // 2]


def relative(ours: Tensors, theirs: Tensors, truth: Tensors | None = None) -> dict[str, float]:
    """‖ours − theirs‖ / ‖truth‖ of each tensor, the truth being theirs if none is given; infinite where not finite.

    Raises `ValueError` where they are not the same tensors by name.

    >>> relative({"w": np.array([1.0]), "zero": np.array([1e-17])}, {"w": np.array([2.0]), "zero": np.array([0.0])})
    {'w': 0.5, 'zero': 5e-18}
    """
    truth = theirs if truth is None else truth
    if ours.keys() != theirs.keys():
        raise ValueError(f"in one of the runs only: {sorted(ours.keys() ^ theirs.keys())}")
    whole = _norm(truth.values())
    scales = {name: _scale(_norm([truth[name]]), whole) for name in theirs}
    return {name: _ratio(_norm([_minus(ours[name], x)]), scales[name]) for name, x in theirs.items()}


def _verdict(ours: Record, theirs: Record, truth: Record, error_ratio: float | None, faults: Sequence[str]) -> Verdict:
    _, loss_rel = _worst(relative(_losses(ours), _losses(theirs)))
    grad_worst, grad_rel = _worst(relative(ours.grads, theirs.grads, truth.grads))
    _, param_rel = _worst(relative(ours.last.params, theirs.last.params, truth.last.params))
    return Verdict(loss_rel, grad_rel, grad_worst, param_rel, error_ratio, tuple(faults))


def _apart(
    ours: Record, theirs: Record, one_ulp: Sequence[Record], course: Trajectory | None, judged: int
) -> Iterator[str]:
    """A line for each group of tensors of which one is farther apart than its bar, in the order of a run."""
    steps = len(theirs.losses)
    noise = np.zeros(steps) if course is None else RATIO_BAR * course.noise
    bars = np.maximum(LAST_BAR, np.where(np.arange(steps) < judged, 0.0, noise))
    for what, our, their in _pairs(_first(ours), _first(theirs)):
        yield from _over(what, relative(our, their), FIRST_BAR)
    distances = _along(ours, theirs)
    for step in np.flatnonzero(np.isinf(distances) | (distances > bars))[:1]:
        yield from _over("loss", {f"step {step + 1}": distances[step]}, bars[step])
    for what, our, their in _pairs(_present(ours.last), _present(theirs.last)):
        bar = LAST_BAR
        if course is not None and steps > judged:
            nudged = [dict(_present(run.last))[what] for run in one_ulp]
            farthest = max(_worst(relative(tensors, their))[1] for tensors in nudged)
            bar = max(LAST_BAR, RATIO_BAR * farthest * float(course.spread[-1]))
        yield from _over(f"{what} after the last step", relative(our, their), bar)


def _over(what: str, distances: dict[str, float], bar: float) -> Iterator[str]:
    name, distance = _worst(distances)
    if math.isinf(distance) or distance > bar:
        yield f"{what}, {name}: {distance:.1e} apart, over {bar:.0e}"


def _pairs(
    ours: Iterable[tuple[str, Tensors]], theirs: Iterable[tuple[str, Tensors]]
) -> Iterator[tuple[str, Tensors, Tensors]]:
    return ((what, our, their) for (what, our), (_, their) in zip(ours, theirs, strict=True))


def _first(record: Record) -> Iterator[tuple[str, Tensors]]:
    yield "first loss", _losses(record, 1)
    yield "gradient", record.grads
    for what, tensors in _present(record.first):
        yield f"{what} after the first update", tensors


def _present(snapshot: Snapshot) -> Iterator[tuple[str, Tensors]]:
    """Its groups of tensors; a model without state has no buffers."""
    groups = {"params": snapshot.params, **snapshot.moments, "buffers": snapshot.buffers}
    return ((what, tensors) for what, tensors in groups.items() if tensors)


def _losses(record: Record, steps: int | None = None) -> Tensors:
    return {f"step {i}": loss for i, loss in enumerate(record.losses[:steps], start=1)}


def _course(ours: Record, theirs: Record, one_ulp: Sequence[Record], limit: float | np.ndarray) -> Trajectory | None:
    if not one_ulp:
        return None
    return trajectory(_along(ours, theirs), [_along(run, theirs) for run in one_ulp], limit)


def _along(ours: Record, theirs: Record) -> np.ndarray:
    """[steps]: how far apart the losses are."""
    return np.array([*relative(_losses(ours), _losses(theirs)).values()])


def _errors(run: Record, truth: Record) -> dict[str, float]:
    """Root mean square distances of a run to the truth."""
    errors = {
        "losses": _rms(_losses(run), _losses(truth)),
        "first gradient": _rms(run.grads, truth.grads),
        "last parameters": _rms(run.last.params, truth.last.params),
    }
    if truth.last.buffers:
        errors["last buffers"] = _rms(run.last.buffers, truth.last.buffers)
    return errors


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
    return math.sqrt(sum(float(np.vdot(x, x)) for x in map(np.float64, tensors)))
