"""What one process is to time: a workload, by an engine, under settings."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Job:
    """`sizes` override the workload's own (rows, depth, …); `feature` is one of `benchmarks.features`, of JAX only.

    >>> Job.from_json(Job("gpt2-tiny", "jax", sizes={"rows": 4}).as_json()).sizes
    {'rows': 4}
    """

    workload: str
    engine: str
    precision: str = "fp32"
    accumulate: int = 1
    remat: str = "none"
    sizes: Mapping[str, int] = field(default_factory=dict)
    feature: str = ""

    def by(self, engine: str) -> "Job":
        """The same work by another engine."""
        return replace(self, engine=engine)

    def as_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> "Job":
        """Of `as_json`."""
        given: dict[str, Any] = json.loads(line)
        return Job(**given)
