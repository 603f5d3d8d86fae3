"""What a run's folder tells of it, while it trains and after."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.observe.metrics import read_metrics
from jaxtrain.run_folder import RunFolder


class ClockPoint(NamedTuple):
    """How long a run had been in its steps at `step`: without compiling, evaluating and saving."""

    step: int
    seconds: float
    units: float
    """Tokens or examples it had learned from."""


@dataclass(frozen=True)
class Record:
    """A run as its files have it."""

    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""
    references: Mapping[str, float]
    """Losses that a useful model must beat, by name, in nats."""
    sample: str | None
    sample_step: int
    worst: Mapping[str, Any] | None
    """What the newest `jaxtrain eval` found the model to be worst at."""

    @property
    def step(self) -> int:
        """The last one logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @cached_property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """The lines with a validation loss."""
        return [line for line in self.metrics if line.get("eval_loss") is not None]

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The line of the lowest validation loss."""
        return min(self.evaluations, key=lambda line: line["eval_loss"], default=None)

    @property
    def scaled(self) -> bool:
        """Whether its loss is scaled."""
        return any(line.get("loss_scale") not in (None, 1) for line in self.metrics)

    @property
    def skipped(self) -> int:
        """Updates left out for an inf or NaN."""
        return int(sum(self._all("skipped")))

    @property
    def peak_memory(self) -> float | None:
        """In bytes."""
        return max(self._all("peak_memory_bytes"), default=None)

    @cached_property
    def unit(self) -> str:
        """What its throughput counts: "tokens" or "examples"."""
        names = [name for line in self.metrics for name in line if name.endswith("_per_s")]
        return names[0].removesuffix("_per_s") if names else "examples"

    @property
    def throughput(self) -> float | None:
        """Of the median line, in `unit` a second."""
        rates = self._all(f"{self.unit}_per_s")
        return float(np.median(rates)) if rates else None

    @cached_property
    def clock(self) -> list[ClockPoint]:
        """One tick a logged step, and one at 0."""
        ticks = [ClockPoint(0, 0.0, 0.0)]
        for line in self.metrics:
            if line.get("step_time_s") and line["step"] > ticks[-1].step:
                spent = (line["step"] - ticks[-1].step) * line["step_time_s"]
                units = spent * (line.get(f"{self.unit}_per_s") or 0.0)
                ticks.append(ClockPoint(line["step"], ticks[-1].seconds + spent, ticks[-1].units + units))
        return ticks

    def _all(self, name: str) -> list[float]:
        return [line[name] for line in self.metrics if line.get(name) is not None]


def read_record(run: RunFolder) -> Record:
    """Read a run's folder. Raises `UserError` where it holds none, or what cannot be read."""
    if not run.config.exists():
        raise UserError(f"{run.path} holds no run: name the folder of one, as in jaxtrain report runs/gpt-stdlib")
    try:
        config = json.loads(run.config.read_text())
        _ = config["recipe"], config["settings"].items()
        result = json.loads(_result(run).read_text()) if _result(run).exists() else {}
        return Record(
            name=str(run.path),
            config=config,
            metrics=read_metrics(run.metrics),
            references=result.get("references", {}),
            sample=result.get("sample"),
            sample_step=result.get("step", 0),
            worst=_newest(run.path / "eval"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{run.path} cannot be read ({error!r}): restore it, or leave it out") from error


def write_result(run: RunFolder, *, step: int, references: Mapping[str, float], sample: str | None) -> None:
    """Keep what the end of a run tells, beside its metrics: result.json, whole or not at all."""
    partial = _result(run).with_suffix(".partial")
    partial.write_text(json.dumps({"step": step, "references": dict(references), "sample": sample}) + "\n")
    partial.replace(_result(run))


def _result(run: RunFolder) -> Path:
    return run.path / "result.json"


def _newest(folder: Path) -> dict[str, Any] | None:
    """What the evaluation of the latest step left there; of two, that of the validation examples."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.worst.json")]
    return max(found, key=lambda worst: (worst["step"], worst["split"] == "validation"), default=None)
