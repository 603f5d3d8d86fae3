"""The figures of a suite: the rows, ratios and exponents of the JSON document."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import host, run, updates
from benchmarks.ceiling import COPY_BYTES
from benchmarks.job import Job
from benchmarks.timing import Timing
from benchmarks.workloads import WORKLOADS


def rows(timings: Sequence[Timing], ceilings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return a row for each timing of a group.

    The FLOPs of PyTorch's rows are those counted in JAX's program, which is the same mathematics.

    Args:
      timings: The timings.
      ceilings: The ceilings of the same rounds.
    """
    flops = {_size_key(t.job): t.flops for t in timings if t.flops}
    return [_row(t, flops.get(_size_key(t.job)), _peak_rate(ceilings, t.job.product_precision)) for t in timings]


def ceiling_rows(ceilings: Sequence[Timing], beside: str) -> list[dict[str, Any]]:
    """Return a row for each ceiling: FLOP/s of products, bytes/s of copies.

    Args:
      ceilings: The timings.
      beside: The workload whose rounds they are from.
    """
    return [{"beside": beside, **_ceiling_row(timing)} for timing in ceilings]


def ratios(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return the speed of JAX relative to each PyTorch engine on the same work. Above 1 JAX is faster.

    A ratio is the median over the rounds, in each of which both took a turn; `intervals` has what contains it with a
    confidence of 95%, where there are enough rounds.
    """
    found = []
    for jax in timings:
        if jax.job.engine != "jax":
            continue
        plain = replace(jax.job, feature="")
        others = [t for t in timings if t.job.engine.startswith("torch") and _is_plain(t.job, plain)]
        # Of an engine with several kernels, the fastest.
        others.sort(key=lambda t: float(np.median(t.turns)), reverse=True)
        by_round = {t.job.engine: t.turns / jax.turns for t in others}
        if by_round:
            medians = {engine: float(np.median(found)) for engine, found in by_round.items()}
            found.append(
                {
                    **_settings(jax.job),
                    "jax_vs_eager": medians.get("torch_eager"),
                    "jax_vs_compile": medians.get("torch_compile"),
                    "jax_vs_best": min(medians.values()),
                    "intervals": {engine: median_interval(found) for engine, found in by_round.items()},
                }
            )
    return found


def _is_plain(job: Job, plain: Job) -> bool:
    """Return whether a job of PyTorch does the work of JAX's plain one."""
    return replace(job, engine="jax", feature="") == plain


def median_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> tuple[float, float] | None:
    """Return an interval that contains the median of a distribution, from independent values of it.

    Its ends are values, as many from the least as from the greatest: the median is outside with the probability that
    so few of the values are on one side of it. None if even the least and the greatest are not far enough apart.

    Example:
      >>> median_interval([3, 1, 2, 5, 4, 6]), median_interval([1, 2, 3])
      ((1.0, 6.0), None)
    """
    ordered, n = np.sort(values), len(values)
    outside, skipped = 0.0, 0
    while outside + 2 * math.comb(n, skipped) / 2**n <= 1 - confidence:
        outside += 2 * math.comb(n, skipped) / 2**n
        skipped += 1
    return (float(ordered[skipped - 1]), float(ordered[n - skipped])) if skipped else None


def exponents(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Fit seconds ~ size^exponent for each engine and size that varies."""
    fits = []
    sizes = sorted({name for t in timings for name in _varied_sizes(t.job)})
    for engine in dict.fromkeys(t.job.engine for t in timings):
        for size in sizes:
            selected = [t for t in timings if t.job.engine == engine and size in _varied_sizes(t.job)]
            points = [(_varied_sizes(t.job)[size], t.lower_decile_s) for t in selected]
            if len(points) > 1:
                fits.append({"engine": engine, "size": size, "exponent": slope(points)})
    return fits


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Fit y ~ x^p through points (x, y), by least squares of the logarithms, and return p.

    Example:
      >>> round(slope([(1, 3.0), (2, 12.0), (4, 48.0)]), 6)
      2.0
    """
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def _row(timing: Timing, flops: int | None, peak_rate: float | None) -> dict[str, Any]:
    wall, (units, unit) = timing.wall, _units_per_step(timing)
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
        "mfu": None if peak_rate is None or flops is None else flops / timing.lower_decile_s / peak_rate,
        "compile_s": timing.compile_s,
        "warm_compile_s": timing.warm_compile_s,
        "predicted_s": None,
        **timing.predicted,
    }


def _ceiling_row(timing: Timing) -> dict[str, Any]:
    seconds = timing.lower_decile_s
    copied = 2 * COPY_BYTES["cpu" if timing.device == "cpu" else "gpu"]
    return {
        "what": timing.job.workload,
        "engine": timing.job.engine,
        "precision": timing.job.precision,
        "per_s": (copied if timing.flops is None else timing.flops) / seconds,
        "unit": "byte" if timing.flops is None else "FLOP",
    }


def _settings(job: Job) -> dict[str, Any]:
    return {
        "workload": job.workload,
        "precision": job.precision,
        "accumulate": job.accumulate,
        "remat": job.remat,
        "feature": job.feature,
        "sizes": dict(job.sizes),
    }


def _units_per_step(timing: Timing) -> tuple[int, str]:
    """Return (number, name) of the units that throughput counts."""
    job = timing.job
    if timing.units is not None:
        number, name = timing.units
        return number, name
    if job.workload in updates.UPDATES:
        return updates.parameters(job.sizes), "parameters"
    if job.workload == run.WORKLOAD:
        return run.steps_per_step(job.feature), "steps"
    if job.workload in host.INPUTS:
        return host.examples_per_step(job.workload), "examples"
    workload = WORKLOADS[job.workload]
    return workload.units_per_step(job.sizes), workload.unit


def _size_key(job: Job) -> tuple[Any, ...]:
    return job.workload, *sorted(job.sizes.items())


def _varied_sizes(job: Job) -> Mapping[str, int]:
    """Return the sizes that distinguish a job; for a window of equal micro-batches only their number."""
    return {"micro-batches": job.accumulate} if job.accumulate > 1 else job.sizes


def _peak_rate(ceilings: Sequence[Timing], precision: str) -> float | None:
    """Return the FLOP/s of the fastest product in a precision, by either framework."""
    rates = [t.flops / t.lower_decile_s for t in ceilings if t.job.precision == precision and t.flops]
    return max(rates, default=None)
