"""A job: one workload, run by one engine under given settings, in one process."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Job:
    """A workload with the engine and the settings to run it under.

    Attributes:
      workload: A name in `benchmarks.workloads`, or of an update, input, run or ceiling.
      engine: "jax", "optax", "torch_eager" or "torch_compile".
      precision: "fp32", "tf32", "bf16", "fp16" or "bf16_compute"; "fp64" only in the equality check.
      accumulate: Micro-batches per window.
      remat: Rematerialization policy.
      sizes: Overrides of the workload's own sizes (rows, depth, ...).
      feature: A name in `benchmarks.features` or `benchmarks.run`; for PyTorch, of the kernel that its attention uses,
        in `benchmarks.engines.TORCH_ATTENTION`; "" for the plain step.

    Example:
      >>> Job.from_json(Job("gpt2-tiny", "jax", sizes={"rows": 4}).to_json()).sizes
      {'rows': 4}
    """

    workload: str
    engine: str
    precision: str = "fp32"
    accumulate: int = 1
    remat: str = "none"
    sizes: Mapping[str, int] = field(default_factory=dict)
    feature: str = ""

    @property
    def product_precision(self) -> str:
        """The precision of the job's matrix products."""
        return {"bf16_compute": "bf16"}.get(self.precision, self.precision)

    def with_engine(self, engine: str) -> "Job":
        """Return the same job for another engine."""
        return replace(self, engine=engine)

    def to_json(self) -> str:
        """Serialize to one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> "Job":
        """Deserialize the output of `to_json`."""
        fields: dict[str, Any] = json.loads(line)
        return Job(**fields)
