"""Functions of the user's that the training loop calls."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.run import Media, MediaFile, encode_media
from jaxtrain.step import TrainState

OnStep = Callable[[int, Mapping[str, Any], TrainState], Mapping[str, Any] | None]
OnEvaluation = Callable[[int, Mapping[str, float], TrainState], Mapping[str, Any] | None]
OnCheckpoint = Callable[[int, Path], None]


class Events:
    """Calls functions of the user's after a step, an evaluation and a checkpoint, and collects the media to log.

    The first exception is kept in `error`, and nothing is called after it: the loop saves the run and raises it.

    Args:
      on_step: Called as `f(step, metrics, state)` after each step was dispatched; reading an array waits for it.
        It may return media by tag, or None.
      on_evaluation: Called as `f(step, metrics, state)`. It may return media by tag, or None.
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
        self._media: dict[str, list[MediaFile]] = {}

    def step(self, step: int, metrics: Mapping[str, Any], state: TrainState) -> None:
        """Report a dispatched step. The state's arrays are donated to the next step."""
        self._call(self._on_step, step, metrics, state, source="on_step")

    def evaluation(self, step: int, metrics: Mapping[str, float], state: TrainState, media: Media) -> None:
        """Report an evaluation; `media` is what it returned."""
        self._call([lambda: media], source="evaluate")
        self._call(self._on_evaluation, step, metrics, state, source="on_evaluation")

    def checkpoint(self, step: int, path: Path) -> None:
        """Report a committed checkpoint."""
        self._call(self._on_checkpoint, step, path)

    def take_media(self) -> Media:
        """Return the media since the previous call, to be logged."""
        media, self._media = self._media, {}
        return media

    def _call(self, functions: Iterable[Callable[..., Any]], *args: Any, source: str = "") -> None:
        """Call functions and collect the media that they return; `source` names those whose media are logged."""
        for function in functions:
            if self.error is not None:
                return
            try:
                returned = function(*args)
                if source and returned is not None:
                    self._collect(source, returned)
            except Exception as error:
                self.error = error

    def _collect(self, source: str, returned: Any) -> None:
        if not isinstance(returned, Mapping):
            raise UserError(f"{source} returned {type(returned).__name__}: return None, or a mapping of tags to media")
        for tag, files in encode_media(returned).items():
            if tag in self._media:
                raise UserError(f"media {tag!r} of {source} were already logged at this step: use another tag")
            self._media[tag] = files
