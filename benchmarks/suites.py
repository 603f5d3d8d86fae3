"""Which work is timed beside which, and what is said of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import features, host, run, updates
from benchmarks.job import Job
from benchmarks.timing import Timing, timed
from benchmarks.workloads import WORKLOADS
from jaxtrain.errors import RunFailed

Told = Callable[[str], None]
EPSILON = {"fp32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7, "fp16": 2.0**-10}
SAME = 8
"""Roundings of the precision by which two engines' first losses, means over a batch, may differ relatively."""


@dataclass(frozen=True)
class Suite:
    """`groups`: jobs that are timed together, the first of each being what the others are compared with. `rounds` of
    turns for each."""

    groups: Sequence[Sequence[Job]]
    rounds: int
    ceilings: Sequence[str]


def _beside(workload: str, precision: str, *engines: str, **settings: Any) -> list[Job]:
    return [Job(workload, engine, precision, **settings) for engine in ("jax", *engines)]


BOTH = ("torch_eager", "torch_compile")
SCALED = ("jax", "torch_eager")
SUITES: Mapping[str, Suite] = {
    "cpu": Suite(
        [
            _beside("gpt2-tiny", "fp32", *BOTH),
            _beside("gpt2-tiny", "bf16", *BOTH),
            _beside("mlp-launch-bound", "fp32", *BOTH),
            _beside("mlp-launch-bound", "bf16", *BOTH),
            _beside("resnet18", "fp32", "torch_eager"),
        ],
        rounds=20,
        ceilings=["fp32", "bf16"],
    ),
    "gpu": Suite(
        [
            _beside("gpt2-124m", "bf16", *BOTH),
            _beside("gpt2-124m", "fp16", *BOTH),
            _beside("gpt2-124m", "bf16", "torch_eager", remat="full"),
            _beside("resnet50", "bf16", *BOTH),
            _beside("llama-160m", "bf16", "torch_eager"),
            _beside("vit-s", "bf16", "torch_eager"),
            _beside("mlp-launch-bound", "fp32", *BOTH),
        ],
        rounds=6,
        ceilings=["bf16", "fp16", "fp32"],
    ),
    "optimizers": Suite(
        [[Job(update, engine) for engine in updates.ENGINES] for update in updates.UPDATES], rounds=20, ceilings=[]
    ),
    "host": Suite(
        [
            _beside("mlp-host", "fp32", *BOTH),
            *([Job(workload, engine) for engine in host.ENGINES] for workload in host.INPUTS),
        ],
        rounds=20,
        ceilings=[],
    ),
    "features": Suite(
        [
            [
                Job("gpt2-tiny", "jax", feature=feature)
                for feature in ("bare", "no clipping", "", "loss scaling", "ema")
            ],
            [Job("gpt2-tiny", "jax"), Job("gpt2-tiny", "jax", accumulate=4), Job("gpt2-tiny", "jax", "bf16")],
            [
                Job("gpt2-tiny", "jax", accumulate=8, sizes={"rows": 96}, feature=feature)
                for feature in (features.MICRO_STEPS, "")
            ],
            [Job("gpt2-tiny", "jax"), *(Job("gpt2-tiny", "jax", remat=policy) for policy in ("dots", "full"))],
            _beside("gpt2-tiny", "fp32", "torch_eager", remat="full", sizes={"length": 256}),
            [Job(run.WORKLOAD, "jax", feature=feature) for feature in run.STEPS],
            [Job(run.WORKLOAD, "jax", feature=feature) for feature in run.SAVES],
        ],
        rounds=20,
        ceilings=[],
    ),
    "scaling": Suite(
        [
            [Job("gpt2-tiny", engine, sizes={size: value}) for value in values for engine in SCALED]
            for size, values in {"rows": (4, 8, 16, 32), "length": (32, 64, 128, 256), "depth": (1, 2, 4, 8)}.items()
        ]
        + [[Job("gpt2-tiny", engine, accumulate=k, sizes={"rows": 12 * k}) for k in (2, 4, 8) for engine in SCALED]],
        rounds=8,
        ceilings=[],
    ),
}


def measured(suite: Suite, told: Told) -> tuple[list[Timing], list[Timing]]:
    """(timings, ceilings) of a suite. Raises `RunFailed` where engines do other work than each other."""
    _prove({job.workload for group in suite.groups for job in group} & WORKLOADS.keys(), told)
    ceilings = [t for precision in suite.ceilings for t in timed(_ceilings(precision), 2, told)]
    timings = []
    for group in suite.groups:
        found = timed(group, suite.rounds, told)
        _check_same(found)
        timings += found
    return timings, ceilings


def rows(timings: Sequence[Timing], ceilings: Sequence[Timing]) -> list[dict[str, Any]]:
    """What the JSON holds of each timing. FLOPs are counted in JAX's program, which is the same mathematics."""
    flops = {_size(t.job): t.flops for t in timings if t.flops}
    return [_row(t, flops.get(_size(t.job)), _highest(ceilings, t.job.precision)) for t in timings]


def ratios(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """JAX beside each of PyTorch's engines on the same work, of lower deciles; over 1 is faster."""
    found = []
    for ours in timings:
        if ours.job.engine != "jax":
            continue
        theirs = {t.job.engine: t.lower_decile_s for t in timings if t.job.by("jax") == ours.job and t is not ours}
        theirs = {engine: seconds for engine, seconds in theirs.items() if engine.startswith("torch")}
        if theirs:
            found.append(
                {
                    **_settings(ours.job),
                    "jax_vs_eager": _over(theirs.get("torch_eager"), ours),
                    "jax_vs_compile": _over(theirs.get("torch_compile"), ours),
                    "jax_vs_best": _over(min(theirs.values()), ours),
                }
            )
    return found


def exponents(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """How the cost grows with each size: seconds ~ size^exponent, by least squares of the logarithms."""
    found = []
    sizes = sorted({name for t in timings for name in _grown(t.job)})
    for engine in dict.fromkeys(t.job.engine for t in timings):
        for size in sizes:
            own = [t for t in timings if t.job.engine == engine and size in _grown(t.job)]
            points = [(_grown(t.job)[size], t.lower_decile_s) for t in own]
            if len(points) > 1:
                found.append({"engine": engine, "size": size, "exponent": slope(points)})
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of y ~ x^p through (x, y), by least squares of the logarithms.

    >>> round(slope([(1, 3.0), (2, 12.0), (4, 48.0)]), 6)
    2.0
    """
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def _grown(job: Job) -> Mapping[str, int]:
    """The sizes that set a job apart; of a window that grows by whole micro-batches, their number alone."""
    return {"micro-batches": job.accumulate} if job.accumulate > 1 else job.sizes


def _over(theirs: float | None, ours: Timing) -> float | None:
    return None if theirs is None else theirs / ours.lower_decile_s


def _settings(job: Job) -> dict[str, Any]:
    return {
        "workload": job.workload,
        "precision": job.precision,
        "accumulate": job.accumulate,
        "remat": job.remat,
        "feature": job.feature,
        "sizes": dict(job.sizes),
    }


def _size(job: Job) -> tuple[Any, ...]:
    return job.workload, *sorted(job.sizes.items())


def _row(timing: Timing, flops: int | None, ceiling: float | None) -> dict[str, Any]:
    wall, (units, unit) = timing.wall, _counted(timing.job)
    return {
        **_settings(timing.job),
        "engine": timing.job.engine,
        "device": timing.device,
        "median_s": float(np.median(wall)),
        "min_s": float(wall.min()),
        "lower_decile_s": timing.lower_decile_s,
        "upper_decile_s": float(np.percentile(wall, 90)),
        "cpu_s": float(np.percentile(timing.cpu, 10)),
        "per_s": units / timing.lower_decile_s,
        "unit": unit,
        "peak_bytes": timing.peak_bytes,
        "flops": flops,
        "mfu": None if ceiling is None or flops is None else flops / timing.lower_decile_s / ceiling,
        "compile_s": timing.compile_s,
        "warm_compile_s": timing.warm_compile_s,
    }


def _counted(job: Job) -> tuple[int, str]:
    """What a step's throughput counts."""
    if job.workload in updates.UPDATES:
        return updates.parameters(job.sizes), "parameters"
    if job.workload == run.WORKLOAD:
        return run.steps_of(job.feature), "steps"
    if job.workload in host.INPUTS:
        return host.examples(job.workload), "examples"
    workload = WORKLOADS[job.workload]
    return workload.units(job.sizes), workload.unit


def _ceilings(precision: str) -> list[Job]:
    return [Job(what, engine, precision) for what in ("product", "copy") for engine in ("jax", "torch_eager")]


def _highest(ceilings: Sequence[Timing], precision: str) -> float | None:
    """FLOP/s of the fastest product in the precision, whoever made it."""
    rates = [t.flops / t.wall.min() for t in ceilings if t.job.precision == precision and t.flops]
    return max(rates, default=None)


def _prove(workloads: set[str], told: Told) -> None:
    """Two steps of a small size in float64: where they differ, times mean nothing."""
    from parity import check
    from parity.cases import case_of

    for name in sorted(workloads):
        told(f"{name}: is it the same work?")
        verdict = check(case_of(WORKLOADS[name].proof), "fp64", steps=2)
        if not verdict.passed:
            raise RunFailed(f"{name}: the engines do not do the same work, {verdict.faults[0]}: parity run says where")


def _check_same(timings: Sequence[Timing]) -> None:
    """At full size the first losses are the first engine's, to a few roundings; the very first, of other features."""
    first = timings[0]
    for other in timings[1:]:
        if other.job.sizes != first.job.sizes:
            first = other
        # Without clipping, the second step starts elsewhere.
        compared = None if other.job.feature == first.job.feature else 1
        losses = zip(other.losses[:compared], first.losses[:compared], strict=True)
        apart = max((abs(a - b) / abs(b) for a, b in losses), default=0.0)  # an update has none
        bar = SAME * max(EPSILON[t.job.precision] for t in (first, other))
        if not apart <= bar:
            raise RunFailed(
                f"{other.job.workload} by {other.job.engine} in {other.job.precision} is other work than by "
                f"{first.job.engine}: losses {other.losses} against {first.losses}"
            )
