"""One line of metrics.jsonl, typed.

The loop creates a `LogLine` for every logged step; the log, the console, TensorBoard, the report and the trackers read
its attributes. Only this file knows the keys on disk.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from jaxtrain.observe.line_types import MEDIA, PRECISION
from jaxtrain.step import PrecisionLosses


class Throughput(NamedTuple):
    """Training throughput."""

    unit: str
    """What is counted: "tokens" or "examples"."""
    per_s: float


class Rollback(NamedTuple):
    """A return to an earlier checkpoint after a loss spike."""

    from_step: int
    """The step whose loss spiked."""
    to_step: int
    """The step of the checkpoint that was restored."""
    spike_loss: float
    batches_skipped: int

    def to_json(self) -> dict[str, float]:
        """Return the numbers by their keys in metrics.jsonl."""
        return dict(zip(_ROLLBACK_KEYS, self, strict=True))

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Rollback":
        """Return the rollback that `to_json` wrote."""
        start, target, loss, batches = (line[key] for key in _ROLLBACK_KEYS)
        return cls(int(start), int(target), float(loss), int(batches))


_ROLLBACK_KEYS = ("rolled_back_from", "rolled_back_to", "spike_loss", "batches_skipped")
# Attribute -> key on disk, where the two differ.
_KEYS = {"gpu_utilization": "gpu_utilisation"}
_NUMBERS = (
    *("loss", "grad_norm", "loss_scale", "skipped", "step_time_s", "input_wait_s", "peak_memory_bytes", "lr"),
    *("mfu", "gpu_utilization"),
)
LOSS_SCALES = "loss_scales/"
"""Prefix of the keys of the loss scales of layers, among the metrics of a run."""
_RATE, _EVAL, _PER_S = "lr/", "eval_", "_per_s"
SHARE = f"{PRECISION}/"


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """The metrics of one logged step. None is "not measured"; a number that is not finite is written as null.

    >>> line = LogLine.from_json({"step": 2, "loss": None, "tokens_per_s": 9.0, "eval_loss": 1.5, "mine": 3})
    >>> line.loss, line.throughput, line.eval_loss, line.other
    (nan, Throughput(unit='tokens', per_s=9.0), 1.5, {'mine': 3})
    >>> line.to_json()
    {'step': 2, 'loss': None, 'tokens_per_s': 9.0, 'eval_loss': 1.5, 'mine': 3}
    """

    step: int
    loss: float | None = None
    """Mean training loss since the previous line, weighted by the loss's weight."""
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None
    """Updates skipped since the previous line."""
    throughput: Throughput | None = None
    step_time_s: float | None = None
    input_wait_s: float | None = None
    """The part of `step_time_s` spent waiting for the batch."""
    peak_memory_bytes: float | None = None
    lr: float | None = None
    """Learning rate of the last update; with parameter groups that of the first one."""
    group_lrs: Mapping[str, float] = field(default_factory=dict)
    rollback: Rollback | None = None
    mfu: float | None = None
    """Model FLOPs utilization, in [0, 1]."""
    gpu_utilization: float | None = None
    """Share of the time that the GPU was busy, in [0, 1]."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """Mean validation loss and metrics, by name, without the prefix `eval_`."""
    other: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of a user's own loop."""
    precision: PrecisionLosses | None = None
    """What the precision loses of the step's first micro-batch."""
    media: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of files in the run's folder `media`, by tag."""

    @property
    def eval_loss(self) -> float | None:
        """Mean validation loss."""
        return self.evaluation.get("loss")

    @property
    def has_finite_eval_loss(self) -> bool:
        """Whether the line holds a validation loss that can be compared."""
        return self.eval_loss is not None and math.isfinite(self.eval_loss)

    @classmethod
    def of(cls, line: Self | Mapping[str, Any]) -> Self:
        """Return `line` itself, or the `LogLine` of a mapping with the keys of metrics.jsonl."""
        return line if isinstance(line, cls) else cls.from_json(line)  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """Return the line that `to_json` wrote, null as NaN; unknown keys go to `other`.

        Raises:
          KeyError: The line has no step.
        """
        left: dict[str, Any] = {key: math.nan if value is None else value for key, value in line.items()}
        known: dict[str, Any] = {"step": left.pop("step")}
        if isinstance(left.get(MEDIA), Mapping):
            known["media"] = left.pop(MEDIA)
        if isinstance(left.get(PRECISION), Mapping):
            known["precision"] = PrecisionLosses.from_json(left.pop(PRECISION))
            left = {key: value for key, value in left.items() if not key.startswith(SHARE)}
        for name in _NUMBERS:
            if _KEYS.get(name, name) in left:
                known[name] = left.pop(_KEYS.get(name, name))
        if rate := next((key for key in left if key.endswith(_PER_S)), None):
            known["throughput"] = Throughput(rate.removesuffix(_PER_S), left.pop(rate))
        if all(key in left for key in _ROLLBACK_KEYS):
            known["rollback"] = Rollback.from_json({key: left.pop(key) for key in _ROLLBACK_KEYS})
        for name, prefix in (("group_lrs", _RATE), ("evaluation", _EVAL)):
            known[name] = {key.removeprefix(prefix): left.pop(key) for key in [*left] if key.startswith(prefix)}
        return cls(**known, other=left)

    def values(self) -> dict[str, Any]:
        """Return every measured number by its key in metrics.jsonl, whether finite or not."""
        throughput = {f"{self.throughput.unit}{_PER_S}": self.throughput.per_s} if self.throughput else {}
        named: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            **throughput,
            "step_time_s": self.step_time_s,
            "input_wait_s": self.input_wait_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "lr": self.lr,
            **{f"{_RATE}{group}": rate for group, rate in self.group_lrs.items()},
            **(self.rollback.to_json() if self.rollback else {}),
            "mfu": self.mfu,
            _KEYS["gpu_utilization"]: self.gpu_utilization,
            **{f"{_EVAL}{name}": value for name, value in self.evaluation.items()},
            **(
                {} if self.precision is None else {f"{SHARE}{k}": share for k, share in self.precision.shares().items()}
            ),
            **self.other,
        }
        return {key: value for key, value in named.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the line as a JSON object: `values`, null for those that are not finite, `precision` and `media`."""
        finite = {key: value if math.isfinite(value) else None for key, value in self.values().items()}
        measured = {} if self.precision is None else {PRECISION: self.precision.to_json()}
        return finite | measured | ({MEDIA: self.media} if self.media else {})
