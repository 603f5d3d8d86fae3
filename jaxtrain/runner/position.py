"""Where a run stands besides its state: in the data, in the next line, and in what its guards remember."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtrain.observe import Gauges, LogLine, Rollback
from jaxtrain.runner.fetched_batches import Batches, DispatchedStep
from jaxtrain.runner.interval import Interval
from jaxtrain.runner.stops.guards import Guard, Spike
from jaxtrain.runner.stops.patience import Patience
from jaxtrain.runner.training import Training, build_gauges
from jaxtrain.step import TrainState, consecutive_skips, is_scaled


@dataclass(frozen=True)
class Position:
    """The parts of a run that advance with its steps. All but the gauges are saved in a checkpoint."""

    batches: Batches
    interval: Interval
    guard: Guard
    patience: Patience
    gauges: Gauges

    @classmethod
    def start(
        cls, training: Training, state: TrainState, batch: Any, *, source: str, message: Callable[[str], None]
    ) -> "Position":
        """Return the position before the first step of a state, or of the shapes of one.

        `source` names the data; `message` prints one line.
        """
        recipe = training.recipe
        has_dynamic_scale = is_scaled(state.loss_scale)
        return cls(
            Batches(training.loader, source, recipe.stall_seconds, message, training.place),
            Interval(recipe, training.task, warn_low_scale=has_dynamic_scale),
            Guard(recipe, state.params, training.task.loss_fn),
            Patience(recipe.patience, training.task.best_metric, is_highest_best=training.task.is_highest_best),
            build_gauges(training, state, batch),
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the threads of batches and gauges."""
        try:
            with self.batches:
                yield
        finally:
            self.gauges.close()

    def add(self, step: DispatchedStep) -> None:
        """Add a dispatched step; raises `RunInvalid` if the one before it is invalid."""
        self.interval.add(step)
        self.guard.add(step)

    def line(self, step: int, state: TrainState) -> LogLine:
        """Return the line to log after `step`; raises `RunInvalid` if that step is invalid."""
        self.guard.settle()
        return self.gauges.measure(self.interval.close(step, state.opt_state))

    def warnings(self, line: LogLine) -> list[str]:
        """Return the warnings that a line gives rise to."""
        found = self.guard.warning(), self.interval.warning(line), self.gauges.warning(line)
        return [text for text in found if text]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, as JSON; waits for the last step."""
        return {
            **self.batches.state(),
            "interval": self.interval.state(),
            "guard": self.guard.state(),
            "patience": self.patience.state(),
        }

    def restore(self, saved: Mapping[str, Any], state: TrainState) -> None:
        """Continue from `state()`, at the checkpoint that holds the training state `state`."""
        self.batches.restore(saved)
        self.interval.restore(saved.get("interval"))
        self.guard.restore(saved.get("guard"), skips=int(consecutive_skips(state.loss_scale)))
        self.patience.restore(saved.get("patience"))

    def roll_back(self, saved: Mapping[str, Any], state: TrainState, spike: Spike) -> Rollback | None:
        """Return to a checkpoint, but in the data to after the spike; None after too many rollbacks to it."""
        target, next_batch = int(state.step), spike.step.batch.next_batch
        if not self.guard.roll_back(target, saved.get("guard"), skips=int(consecutive_skips(state.loss_scale))):
            return None
        loss = float(spike.step.metrics["loss"])
        rollback = Rollback(spike.step.step, target, loss, next_batch - saved["next_batch"])
        self.batches.restore({**saved, "next_batch": next_batch})
        self.interval.restore(saved.get("interval"), rollback)
        self.patience.restore(saved.get("patience"))
        return rollback
