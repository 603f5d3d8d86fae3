"""What a command is doing, shown while it runs."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console

from parity.progress import reported_to

PATIENCE = 1.0
"""Seconds between lines where there is no terminal."""
UPDATE = re.compile(r", update \d+ of \d+$")


@contextmanager
def waiting(console: Console, title: str) -> Iterator[None]:
    """Show the stage of a command: in one line of a terminal, otherwise as lines on stderr.

    Without a terminal a stage that ends within a second has no line, and the updates of a run have one in all.

    Args:
      console: The console of the command.
      title: What the command does, before each stage.
    """
    if console.is_terminal:
        with console.status(title) as status, reported_to(lambda stage: status.update(f"{title} {stage}")):
            yield
        return
    lines = _Lines(title)
    thread = Thread(target=lines.run, daemon=True)
    thread.start()
    try:
        with reported_to(lines.begin):
            yield
    finally:
        lines.ended.set()
        thread.join()


class _Lines:
    """Prints the current stage once a second, if it is another one than before."""

    def __init__(self, title: str) -> None:
        self.title, self.stage, self.ended = title, "", Event()

    def begin(self, stage: str) -> None:
        """Remember the stage."""
        self.stage = stage

    def run(self) -> None:
        """Print until the command has ended."""
        printed = None
        while not self.ended.wait(PATIENCE):
            stage = self.stage
            if (kind := UPDATE.sub("", stage)) != printed:
                print(f"{self.title} {stage}".rstrip(), file=sys.stderr, flush=True)
                printed = kind
