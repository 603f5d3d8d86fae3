"""Functions of the user's that the training loop calls."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.step import TrainState

OnStep = Callable[[int, Mapping[str, Any], TrainState], None]
OnEvaluation = Callable[[int, Mapping[str, float], TrainState], None]
OnCheckpoint = Callable[[int, Path], None]


class Events:
    """Calls functions of the user's after a step, an evaluation and a checkpoint.

    The first exception is kept in `error`, and nothing is called after it: the loop saves the run and raises it.

    Args:
      on_step: Called as `f(step, metrics, state)` after each step was dispatched; reading an array waits for it.
      on_evaluation: Called as `f(step, metrics, state)`.
      on_checkpoint: Called as `f(step, path)` once a checkpoint is committed.
    """

    def __init__(
        self,
        on_step: Iterable[OnStep] = (),
        on_evaluation: Iterable[OnEvaluation] = (),
        on_checkpoint: Iterable[OnCheckpoint] = (),
    ) -> None:
        self._on_step, self._on_evaluation, self._on_checkpoint = [*on_step], [*on_evaluation], [*on_checkpoint]
        self.error: Exception | None = None

    def step(self, step: int, metrics: Mapping[str, Any], state: TrainState) -> None:
        """Report a dispatched step. The state's arrays are donated to the next step."""
        self._call(self._on_step, step, metrics, state)

    def evaluation(self, step: int, metrics: Mapping[str, float], state: TrainState) -> None:
        """Report an evaluation."""
        self._call(self._on_evaluation, step, metrics, state)

    def checkpoint(self, step: int, path: Path) -> None:
        """Report a committed checkpoint."""
        self._call(self._on_checkpoint, step, path)

    def _call(self, functions: Iterable[Callable[..., None]], *args: Any) -> None:
        for function in functions:
            if self.error is not None:
                return
            try:
                function(*args)
            except Exception as error:
                self.error = error
