"""A warning for a loop that builds its step in every iteration, and so compiles it every time."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import warn_user
from jaxtrain.step.checks.mistakes import is_concrete, is_deleted
from jaxtrain.step.state import TrainState

BUILDS = 5
"""Number of steps of one loss_fn, each called once, after which a loop is certain."""


@dataclass(eq=False)
class Uses:
    """The uses of one step.

    Attributes:
      loss_fn: Where its loss_fn is defined; None if unknown.
      calls: Calls so far.
    """

    loss_fn: str | None
    calls: int = 0


_recent: dict[str, deque[Uses]] = {}
_warned: set[str] = set()


def warn_of_rebuilding(uses: Uses, state: Any) -> None:
    """Warn, once per loss_fn, if the steps built from it before were called once each, one after another on one state.

    Called for the first call of a step.
    """
    if uses.loss_fn is None or uses.loss_fn in _warned:
        return
    recent = _recent.setdefault(uses.loss_fn, deque(maxlen=BUILDS))
    recent.append(uses)
    if len(recent) < BUILDS or any(other.calls != 1 for other in recent) or not _has_continued(state):
        return
    _warned.add(uses.loss_fn)
    warn_user(
        f"train_step was called {BUILDS} times for the loss_fn at {uses.loss_fn}, and each step only once: every call "
        "compiles it again. Build the step once, before the loop; a learning rate that changes is a schedule"
    )


def _has_continued(state: Any) -> bool:
    """Return whether the state is the result of the updates of the steps before."""
    if not isinstance(state, TrainState) or not is_concrete(state.step) or is_deleted(state.step):
        return False
    return int(state.step) >= BUILDS - 1
