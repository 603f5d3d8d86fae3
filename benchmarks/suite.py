"""One workload, both engines: the same work made sure of, then timed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.engines import jax_engine, torch_eager
from benchmarks.measure import interleaved
from benchmarks.workloads import Workload
from parity import check


@dataclass(frozen=True)
class Outcome:
    """The rows and the ratio of a workload, as the JSON holds them."""

    rows: list[dict[str, Any]]
    ratio: dict[str, Any]


def measure(name: str, workload: Workload) -> Outcome | None:
    """None where two float64 steps differ: then the engines do different work, and times mean nothing."""
    case = workload.make()
    if not check(case, "fp64", steps=2).passed:
        return None
    batch = case.batch(0, case.rows)
    jax_step, flops = jax_engine(case, batch)
    times = interleaved({"jax": jax_step, "torch_eager": torch_eager(case, batch)})
    # The machine may be throttled by others, never sped up: the lower decile is the engine, the median the day.
    deciles = {engine: float(np.percentile(t, 10)) for engine, t in times.items()}
    rows = [
        {
            "workload": name,
            "engine": engine,
            "precision": "fp32",
            "accumulate": 1,
            "remat": "none",
            "median_s": float(np.median(t)),
            "min_s": float(t.min()),
            "lower_decile_s": deciles[engine],
            "per_s": case.rows * workload.units / deciles[engine],
            "unit": workload.unit,
            "peak_bytes": None,
            "flops": flops,
            "mfu": None,
        }
        for engine, t in times.items()
    ]
    ratio = deciles["torch_eager"] / deciles["jax"]
    return Outcome(rows, {"workload": name, "precision": "fp32", "jax_vs_eager": ratio, "jax_vs_best": ratio})
