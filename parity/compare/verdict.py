"""Distances between runs, and the verdict on them.

No tolerance is taken from the caller. In float64 the bars (`parity.bars`) leave room for rounding and nothing else. In
lower precisions the measure is PyTorch's own distance to the float64 truth.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.bars import FEW_ULPS, FIRST_BAR, LAST_BAR, NEGLIGIBLE, RATIO_BAR, SINGLE, UNSTABLE, tensor_bar
from parity.compare.trajectory import JUDGED, Trajectory, trajectory
from parity.divergence import Divergence
from parity.record import Record, Snapshot, Tensors, as_pairs, norm


@dataclass(frozen=True)
class TensorRatio:
    """The distance of one tensor from the float64 truth, in units of PyTorch's own.

    Attributes:
      what: Which tensor: the gradient of a parameter in the first update, or a buffer after the last.
      ratio: The ratio, of several trainings the median.
      bar: The largest ratio that holds.
      elements: Number of elements.
    """

    what: str
    ratio: float
    bar: float
    elements: int

    def __str__(self) -> str:
        return f"{self.what}: {self.ratio:.3g} times as far from the float64 truth as PyTorch's"


@dataclass(frozen=True)
class Verdict:
    """Whether JAX's run equals PyTorch's, and how far apart they are.

    Attributes:
      loss_rel: Largest relative distance of a loss over the steps.
      grad_rel_max: Largest relative distance of a gradient that the first update received.
      grad_worst: Name of the parameter of that gradient.
      param_rel_max: Largest relative distance of a parameter after the last step.
      error_ratio: Distance to the float64 truth over PyTorch's own, the worst of losses, first gradient, last
        parameters and last buffers; None in float64.
      faults: A line for each check that failed; empty if the case holds.
      tensors: The same ratio of single tensors; empty in float64.
      first_divergence: Where the programs first differ, if that was requested and found.
      stage: The stage of the training step at fault, in one line.
      diagnosis: The convention that explains the difference and the change to make.
      unlocated: Why no location can be given.
      trajectory: The distances over the steps, beside those of PyTorch's runs from weights one ulp off.
    """

    loss_rel: float
    grad_rel_max: float
    grad_worst: str
    param_rel_max: float
    error_ratio: float | None
    faults: tuple[str, ...]
    tensors: tuple[TensorRatio, ...] = field(default=(), compare=False)
    first_divergence: Divergence | None = None
    stage: str | None = None
    diagnosis: str | None = None
    unlocated: str | None = None
    trajectory: Trajectory | None = field(default=None, compare=False)

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return not self.faults

    @property
    def worst_tensor(self) -> TensorRatio | None:
        """The tensor whose ratio is largest beside its bar; None in float64."""
        return max(self.tensors, key=lambda tensor: tensor.ratio / tensor.bar, default=None)

    @property
    def lines(self) -> list[str]:
        """The faults and where they are, one per line."""
        found = self.first_divergence
        where = {"stage": self.stage, "in PyTorch": found and found.torch, "in JAX": found and found.jax_source}
        where |= {"PyTorch's module": found and found.torch_built, "assigned in JAX": found and found.jax_built}
        where |= {"not located": self.unlocated, "diagnosis": self.diagnosis}
        return [*self.faults, *(f"{what}: {text}" for what, text in where.items() if text)]


def same_meaning(
    ours: Record,
    theirs: Record,
    one_ulp: Sequence[Record] = (),
    judged: int = JUDGED,
    nudged: Sequence[Record] = (),
) -> Verdict:
    """Return the verdict on two float64 runs: every loss, gradient, parameter and moment must be within the bars.

    Args:
      ours: JAX's run.
      theirs: PyTorch's run.
      one_ulp: PyTorch's runs from weights one ulp off. If given, values after the first `judged` steps may be apart by
        twice the noise of these runs (`Trajectory.noise`), if that exceeds the bar; and elements of parameters whose
        gradient is rounding noise, by twice what the optimizer made of as much noise in these runs.
      judged: Steps to which the bars apply as they are.
      nudged: JAX's runs with its float32 constants changed within their rounding. If given, values may be apart by
        twice their effect.

    Returns:
      The verdict.
    """
    course = _course(ours, theirs, one_ulp, LAST_BAR)
    faults = [*_apart(ours, theirs, one_ulp, course, judged, nudged)]
    return replace(_verdict(ours, theirs, theirs, None, faults), trajectory=course)


def same_precision(
    ours: Record,
    theirs: Sequence[Record],
    truth: Record,
    one_ulp: Sequence[Record] = (),
    bar: float = RATIO_BAR,
) -> Verdict:
    """Return the verdict on low-precision runs: JAX may be at most `bar` times as far from the truth as PyTorch.

    Losses, gradients, parameters and buffers are each judged as a whole; `by_tensor` judges the ratios of single
    tensors, which this returns, over several trainings. All runs must overflow at the same steps and change the loss
    scale alike. PyTorch's distance counts as no less than two units in the last place of float32
    (`parity.bars.FEW_ULPS`).

    Args:
      ours: JAX's run.
      theirs: PyTorch's runs of the same mathematics, rounded differently, the plain one first. The farthest of them is
        the measured noise of the precision.
      truth: PyTorch's float64 run.
      one_ulp: PyTorch's runs from weights one ulp off, for the trajectory. Where they are as far from its plain run as
        that is from the truth, one of them may be twice as far by chance, and the ratio has no meaning.
      bar: Largest ratio of the distances.

    Returns:
      The verdict.
    """
    errors = [_errors(run, truth) for run in theirs]
    noise = {what: max(floor, *(other[what] for other in errors)) for what, floor in _rounding(truth).items()}
    ratios = {what: _ratio(e, noise[what]) for what, e in _errors(ours, truth).items()}
    faults = [
        f"{what}: {ratio:.3g} times as far from the float64 truth as PyTorch's, over {bar:g}"
        for what, ratio in ratios.items()
        if ratio > bar
    ]
    for step in np.flatnonzero(ours.scales != theirs[0].scales)[:1]:
        faults.append(f"loss scale after step {step}: {ours.scales[step]:g}, PyTorch's {theirs[0].scales[step]:g}")
    own = np.maximum.accumulate(_along(theirs[0], truth))
    course = _course(ours, theirs[0], one_ulp, (RATIO_BAR - 1) * np.maximum(own, SINGLE))
    verdict = _verdict(ours, theirs[0], truth, max(ratios.values()), faults)
    return replace(verdict, trajectory=course, tensors=_tensor_ratios(ours, theirs, truth))


def by_tensor(verdict: Verdict, trainings: Sequence[Sequence[TensorRatio]]) -> Verdict:
    """Return the verdict with each tensor's median ratio over several trainings, and a fault if one is over its bar.

    A tensor of few numbers hides behind the rounding of the others: each is judged by itself. Rounding has discrete
    consequences, such as one ReLU input on the other side of zero. They meet another tensor in each training, while a
    lack of precision meets the same one. Parameters are judged as a whole alone: where rounding turns around the small
    gradient of an element, the optimizer makes a full step of it, which moves single tensors of correct runs up to 84
    times as far from the truth as PyTorch's.

    Args:
      verdict: A verdict of `same_precision`.
      trainings: `Verdict.tensors` of each training.

    Returns:
      The verdict.

    >>> def w(ratio):
    ...     return [TensorRatio("gradient of w", ratio, 2.0, 100)]
    >>> held = Verdict(0.0, 0.0, "w", 0.0, 1.0, ())
    >>> by_tensor(held, [w(9.0), w(1.0), w(1.5)]).worst_tensor.ratio
    1.5
    >>> by_tensor(held, [w(9.0)]).faults
    ("gradient of w: 9 times as far from the float64 truth as PyTorch's, over 2",)
    """
    tensors = tuple(
        replace(
            of[0],
            ratio=float(np.median([tensor.ratio for tensor in of])),
            bar=tensor_bar(of[0].elements, len(trainings)),
        )
        for of in zip(*trainings, strict=True)
    )
    judged = replace(verdict, tensors=tensors)
    worst = judged.worst_tensor
    if worst is None or worst.ratio <= worst.bar:
        return judged
    return replace(judged, faults=(*verdict.faults, f"{worst}, over {worst.bar:.2g}"))


def median(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the median verdict, ordered from best to worst."""
    return sorted(verdicts, key=lambda v: (not v.passed, v.error_ratio or 0.0))[len(verdicts) // 2]


def relative(
    ours: Tensors, theirs: Tensors, truth: Tensors | None = None, noise: Collection[str] = ()
) -> dict[str, float]:
    """Return ‖ours − theirs‖ / ‖truth‖ of each tensor; infinite where a value is not finite.

    Args:
      ours: Tensors by name.
      theirs: Tensors of the same names.
      truth: Tensors whose norms are the unit; None for `theirs`.
      noise: Names of tensors that are measured on the scale of the whole.

    Returns:
      Relative distances by name.

    Raises:
      ValueError: The names differ.

    >>> relative({"w": np.array([1.0]), "zero": np.array([1e-17])}, {"w": np.array([2.0]), "zero": np.array([0.0])})
    {'w': 0.5, 'zero': 5e-18}
    """
    truth = theirs if truth is None else truth
    if ours.keys() != theirs.keys():
        raise ValueError(f"only one of the runs has {sorted(ours.keys() ^ theirs.keys())}")
    whole = norm(truth.values())
    scales = {name: whole if name in noise else _scale(norm([truth[name]]), whole) for name in theirs}
    return {name: _ratio(norm([_minus(ours[name], x)]), scales[name]) for name, x in theirs.items()}


def _verdict(ours: Record, theirs: Record, truth: Record, error_ratio: float | None, faults: Sequence[str]) -> Verdict:
    _, loss_rel = _worst(relative(_losses(ours), _losses(theirs)))
    grad_worst, grad_rel = _worst(relative(ours.grads, theirs.grads, truth.grads))
    _, param_rel = _worst(relative(ours.last.params, theirs.last.params, truth.last.params, _noise(theirs)))
    return Verdict(loss_rel, grad_rel, grad_worst, param_rel, error_ratio, tuple(faults))


def _apart(
    ours: Record,
    theirs: Record,
    one_ulp: Sequence[Record],
    course: Trajectory | None,
    judged: int,
    nudged: Sequence[Record],
) -> Iterator[str]:
    """A line for each group with a tensor farther apart than its bar, in the order of a run."""
    steps = len(theirs.losses)
    noise = np.zeros(steps) if course is None else RATIO_BAR * course.noise
    bars = np.maximum(LAST_BAR, np.where(np.arange(steps) < judged, 0.0, noise))
    rounding = _effects(_first, ours, nudged)
    for what, our, their in _pairs(_first(ours), _first(theirs)):
        our = _without_noise(ours, theirs, one_ulp, "first") if what.startswith("params") else our
        yield from _over(what, relative(our, their, noise=_noise(theirs)), max(FIRST_BAR, rounding[what]))
    if steps == 1:
        return
    distances = _along(ours, theirs)
    bars = np.maximum(bars, max((RATIO_BAR * _along(run, ours).max() for run in nudged), default=0.0))
    for step in np.flatnonzero(np.isinf(distances) | (distances > bars))[:1]:
        yield from _over("loss", {f"step {step + 1}": distances[step]}, bars[step])
    rounding = _effects(lambda run: _present(run.last), ours, nudged)
    for what, our, their in _pairs(_present(ours.last), _present(theirs.last)):
        bar = max(LAST_BAR, rounding[what])
        if course is not None and steps > judged:
            moved = [dict(_present(run.last))[what] for run in one_ulp]
            farthest = max(_worst(relative(tensors, their))[1] for tensors in moved)
            bar = max(bar, RATIO_BAR * farthest * float(course.spread[-1]))
        our = _without_noise(ours, theirs, one_ulp, "last") if what == "params" else our
        our = _within_noise(our, their, [run.last.buffers for run in one_ulp]) if what == "buffers" else our
        yield from _over(f"{what} after the last step", relative(our, their, noise=_noise(theirs)), bar)


def _noise(run: Record) -> frozenset[str]:
    """Names of the parameters whose gradient is rounding noise, as that of a bias before a batch norm.

    Adam divides such a gradient by its own size: an update as large as its `eps` allows, in a direction that rounding
    decides. A gradient of exactly zero is none: it is that of an adapter before its first update.
    """
    whole = norm(run.grads.values())
    return frozenset(name for name, grad in run.grads.items() if 0 < norm([grad]) <= NEGLIGIBLE * whole)


def _without_noise(ours: Record, theirs: Record, one_ulp: Sequence[Record], when: str) -> Tensors:
    """Our parameters, with PyTorch's elements where rounding noise explains how far they are apart.

    The gradient of an attention key bias is zero in mathematics, with rotary positions in some elements. Adam divides
    its noise by its own size or by `eps`: the runs from weights one ulp off tell which elements are noise, and how far
    the optimizer moves them for each unit of noise.
    """
    after, their = (getattr(run, when).params for run in (ours, theirs))
    found, whole = dict(after), norm(theirs.grads.values())
    for name, gradient in theirs.grads.items() if one_ulp else ():
        changes = [_minus(run.grads[name], gradient) for run in one_ulp]
        noise = np.any([np.abs(change) > UNSTABLE * np.abs(as_pairs(gradient)) for change in changes], axis=0)
        moves = [_minus(getattr(run, when).params[name], their[name]) for run in one_ulp]
        sizes = [(norm([move[noise]]), norm([change[noise]])) for move, change in zip(moves, changes, strict=True)]
        gain = max((move / change for move, change in sizes if change), default=0.0)
        own = norm([_minus(ours.grads[name], gradient)[noise]])
        if own <= NEGLIGIBLE * whole and norm([_minus(after[name], their[name])[noise]]) <= RATIO_BAR * gain * own:
            found[name] = np.where(noise, as_pairs(their[name]), as_pairs(after[name]))
    return found


def _within_noise(ours: Tensors, theirs: Tensors, one_ulp: Sequence[Tensors]) -> Tensors:
    """Our buffers, with PyTorch's where the runs from weights one ulp off are half as far apart.

    The running mean of a batch norm follows a bias before it, whose gradient is rounding noise.
    """
    moved = [relative(run, theirs) for run in one_ulp]
    apart = relative(ours, theirs)
    noise = {name: RATIO_BAR * max((run[name] for run in moved), default=0.0) for name in ours}
    is_noise = {name: math.isfinite(bar) and apart[name] <= bar for name, bar in noise.items()}
    return {name: theirs[name] if is_noise[name] else x for name, x in ours.items()}


def _effects(
    groups: Callable[[Record], Iterator[tuple[str, Tensors]]], ours: Record, nudged: Sequence[Record]
) -> dict[str, float]:
    """The bar of each group of tensors that the runs with nudged constants justify."""
    effects = dict.fromkeys(dict(groups(ours)), 0.0)
    for run in nudged:
        for what, moved, our in _pairs(groups(run), groups(ours)):
            effects[what] = max(effects[what], RATIO_BAR * _worst(relative(moved, our))[1])
    return effects


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
    """The groups of tensors of a snapshot; a model without state has no buffers."""
    groups = {"params": snapshot.params, **snapshot.moments, "buffers": snapshot.buffers}
    return ((what, tensors) for what, tensors in groups.items() if tensors)


def _losses(record: Record, steps: int | None = None) -> Tensors:
    return {f"step {i}": loss for i, loss in enumerate(record.losses[:steps], start=1)}


def _course(ours: Record, theirs: Record, one_ulp: Sequence[Record], limit: float | np.ndarray) -> Trajectory | None:
    if not one_ulp:
        return None
    return trajectory(_along(ours, theirs), [_along(run, theirs) for run in one_ulp], limit)


def _along(ours: Record, theirs: Record) -> np.ndarray:
    """Relative distances of the losses, float64[steps]."""
    return np.array([*relative(_losses(ours), _losses(theirs)).values()])


def _errors(run: Record, truth: Record) -> dict[str, float]:
    """Root mean square distances of a run from the truth."""
    errors = {
        "losses": _rms(_losses(run), _losses(truth)),
        "first gradient": _rms(run.grads, truth.grads),
        "last parameters": _rms(run.last.params, truth.last.params),
    }
    if truth.last.buffers:
        errors["last buffers"] = _rms(run.last.buffers, truth.last.buffers)
    return errors


def _rounding(truth: Record) -> dict[str, float]:
    """The distances of `_errors` that float32 explains; 0 for parameters, whose updates are smaller than they are."""
    sizes = {"losses": _size(_losses(truth)), "first gradient": _size(truth.grads)}
    return {what: FEW_ULPS * sizes.get(what, 0.0) for what in _errors(truth, truth)}


def _tensor_ratios(ours: Record, theirs: Sequence[Record], truth: Record) -> tuple[TensorRatio, ...]:
    """The distances of single tensors from the truth, in units of PyTorch's.

    A gradient that is zero in mathematics is measured in units of PyTorch's distance of the whole gradient.
    """
    found = []
    for what, tensors_of in {"gradient": lambda run: run.grads, "buffer": lambda run: run.last.buffers}.items():
        true, size = tensors_of(truth), norm(tensors_of(truth).values())
        whole = max(_rms(tensors_of(run), true) for run in theirs) if true else 0.0
        for name, x in true.items():
            noise = [_rms(tensors_of(run), {name: x}) for run in theirs]
            floor = whole if norm([x]) <= NEGLIGIBLE * size else FEW_ULPS * _size({name: x})
            ratio = _ratio(_rms(tensors_of(ours), {name: x}), max(floor, *noise))
            found.append(TensorRatio(f"{what} of {name}", ratio, RATIO_BAR, x.size))
    return tuple(found)


def _worst(distances: dict[str, float]) -> tuple[str, float]:
    return max(distances.items(), key=lambda item: item[1])


def _rms(run: Tensors, truth: Tensors) -> float:
    return norm(_minus(run[name], x) for name, x in truth.items()) / math.sqrt(sum(x.size for x in truth.values()))


def _size(tensors: Tensors) -> float:
    """Root mean square."""
    return _rms(dict.fromkeys(tensors, np.zeros(())), tensors)


def _scale(norm: float, whole: float) -> float:
    return whole if norm <= NEGLIGIBLE * whole else norm


def _ratio(distance: float, unit: float) -> float:
    if not (math.isfinite(distance) and math.isfinite(unit)):
        return math.inf
    return distance / unit if unit else (math.inf if distance else 0.0)


def _minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.subtract(as_pairs(a), as_pairs(b), dtype=np.float64)
