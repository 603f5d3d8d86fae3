"""The steps between two logged lines: their mean loss, skips and throughput."""

import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

import jax
import numpy as np

from jaxtrain.cost import peak_memory_bytes
from jaxtrain.observe import LOSS_SCALES, LogLine, Rollback, Throughput
from jaxtrain.optim import used_learning_rate, used_learning_rates
from jaxtrain.run import Recipe, Task
from jaxtrain.runner.fetched_batches import DispatchedStep
from jaxtrain.step import STEP_METRICS

# A healthy fp16 run settles at a loss scale in the thousands or above; below this, small gradients underflow.
LOW_SCALE = 1024


class Interval:
    """Collects the steps since the last logged line.

    Args:
      recipe: The settings of the run.
      task: The task of the run, which says what throughput counts.
      warn_low_scale: Whether to warn of a loss scale that stays low.
    """

    def __init__(self, recipe: Recipe, task: Task, *, warn_low_scale: bool = False) -> None:
        self._log_every, self._eval_every = recipe.log_every, recipe.eval_every
        self._per_step, self._unit = recipe.batch_size * task.units_per_row, task.unit
        self._warn_low_scale = warn_low_scale
        self._highest_scale = float("inf")
        self._rollback: Rollback | None = None
        self._restored: list[dict[str, float]] = []
        self._metrics: list[Mapping[str, jax.Array]] = []
        self._wait_s, self._seconds, self._since = 0.0, 0.0, time.perf_counter()

    @property
    def unlogged_rollback(self) -> Rollback | None:
        """The rollback that no line reports yet."""
        return self._rollback

    def add(self, step: DispatchedStep) -> None:
        """Add a dispatched step, after waiting for the one before it, so that the device always has work."""
        if self._metrics:
            self._metrics[-1]["loss"].block_until_ready()
        self._metrics.append(step.metrics)
        self._wait_s += step.batch.wait_s

    def is_due(self, step: int) -> bool:
        """Whether a line is to be logged after this step; the first one after a rollback reports it."""
        return step % self._log_every == 0 or step % self._eval_every == 0 or self._rollback is not None

    def close(self, step: int, opt_state: Any) -> LogLine:
        """Return the line of the interval that ends with `step`, waiting for that step, and begin a new interval."""
        steps = self._on_host()
        self._seconds += time.perf_counter() - self._since
        last, n = steps[-1], len(steps)
        self._highest_scale = max(m["loss_scale"] for m in steps)
        lr, group_lrs = _learning_rates(opt_state)
        line = LogLine(
            step=step,
            loss=_mean("loss", steps),
            grad_norm=last["grad_norm"],
            loss_scale=last["loss_scale"],
            skipped=int(sum(m["skipped"] for m in steps)),
            throughput=Throughput(self._unit, n * self._per_step / self._seconds),
            step_time_s=self._seconds / n,
            input_wait_s=self._wait_s / n,
            peak_memory_bytes=peak_memory_bytes(),
            lr=lr,
            group_lrs=group_lrs,
            rollback=self._rollback,
            other=_other_metrics(steps),
        )
        self._restored, self._metrics, self._rollback = [], [], None
        self._seconds, self._wait_s, self._since = 0.0, 0.0, time.perf_counter()
        return line

    def warning(self, line: LogLine) -> str | None:
        """Return a warning, once, if the loss scale was low throughout the interval of `line`."""
        if not self._warn_low_scale or self._highest_scale >= LOW_SCALE:
            return None
        self._warn_low_scale = False
        return (
            f"warning: step {line.step}: the loss scale stayed at {self._highest_scale:g} or below, so that small "
            "gradients underflow: lower --lr, check that the loss is a mean and not a sum, and that activations do not "
            "overflow, or use --precision bf16"
        )

    def restart_clock(self) -> None:
        """Exclude the time since the last step, spent on evaluation or a checkpoint, from the throughput."""
        self._since = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Exclude this much of the time since the last line from the throughput."""
        self._since += seconds

    def state(self) -> dict[str, Any]:
        """Return the steps since the last line, as JSON, so that a resumed run logs the same; waits for the last."""
        steps = self._on_host()
        if steps:
            self._seconds += time.perf_counter() - self._since
        self._since = time.perf_counter()
        return {"steps": steps, "seconds": self._seconds, "waited": self._wait_s}

    def restore(self, state: Mapping[str, Any] | None, rollback: Rollback | None = None) -> None:
        """Continue from `state()`; None begins an empty interval. `rollback`: what the next line reports."""
        state = state or {"steps": [], "seconds": 0.0}
        self._restored, self._seconds, self._wait_s = state["steps"], state["seconds"], state.get("waited", 0.0)
        self._metrics, self._rollback = [], rollback

    def _on_host(self) -> list[dict[str, float]]:
        """The numbers of every step. A float32 is exact as a Python float, so that a restart changes no mean."""
        ran = [dict(chain(*(_numbers(name, x) for name, x in m.items()))) for m in jax.device_get(self._metrics)]
        return [*self._restored, *ran]


def _numbers(name: str, metric: np.ndarray) -> list[tuple[str, float]]:
    """Return the numbers of a metric by name; those of several layers as "name/0", "name/1" and so on."""
    if metric.ndim == 0:
        return [(name, metric.item())]
    return [(f"{name}/{i}", x) for i, x in enumerate(metric.tolist())]


def _other_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the last scales of layers, and the means of the loss_fn's metrics, over the same rows as the loss."""
    last = steps[-1]
    names = [name for name in last if name not in STEP_METRICS]
    means = {name: _mean(name, [m for m in steps if name in m]) for name in names}
    return means | {name: value for name, value in last.items() if name.startswith(LOSS_SCALES)}


def _mean(name: str, steps: list[dict[str, float]]) -> float:
    """Return the mean of a metric, weighted as the losses of the steps are."""
    weights = np.array([m["weight"] for m in steps])
    return float(np.average([m[name] for m in steps], weights=weights if weights.any() else None))


def _learning_rates(opt_state: Any) -> tuple[float | None, dict[str, float]]:
    """(rate of the last update, rates by parameter group); the first group's rate if there are groups."""
    groups = {name: float(rate) for name, rate in (used_learning_rates(opt_state) or {}).items()}
    if groups:
        return next(iter(groups.values())), groups
    rate = used_learning_rate(opt_state)
    return None if rate is None else float(rate), {}
