"""Ctrl-C that is not lost: Python drops exceptions of callbacks, such as JAX's for the garbage collector."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RETRY_S = 0.01


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """While entered, a KeyboardInterrupt that Python drops, in a callback or a finalizer, is raised again."""
    previous = sys.unraisablehook
    retries: list[threading.Timer] = []

    def hook(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            retries.append(threading.Timer(_RETRY_S, _interrupt_main_thread))
            retries[-1].start()
        else:
            previous(dropped)

    sys.unraisablehook = hook
    try:
        yield
        if retries and not retries[-1].finished.is_set():
            raise KeyboardInterrupt
    finally:
        for retry in retries:
            retry.cancel()
        if sys.unraisablehook is hook:  # else another library has chained its own to it
            sys.unraisablehook = previous


def _interrupt_main_thread() -> None:
    if callable(signal.getsignal(signal.SIGINT)):  # else the signal has its default action meanwhile, or none
        # A signal of the system: that of `_thread.interrupt_main` would not end a wait.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
