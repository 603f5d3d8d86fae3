"""What a check is doing, reported to whoever waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]
"""Called with a line for each stage and each update, such as "fp64: JAX compiles" or "fp64: JAX, update 3 of 20"."""

_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def reported_to(listener: Listener | None) -> Iterator[None]:
    """Call a listener with what checks report while this context is entered.

    Args:
      listener: The listener; None for no other than those of the contexts around this one.

    Example:
      >>> with reported_to(print):
      ...     report("fp64: JAX compiles")
      fp64: JAX compiles
    """
    added = () if listener is None else (listener,)
    before = _LISTENERS.set((*_LISTENERS.get(), *added))
    try:
        yield
    finally:
        _LISTENERS.reset(before)


def report(stage: str) -> None:
    """Report the stage that begins."""
    for listener in _LISTENERS.get():
        listener(stage)
