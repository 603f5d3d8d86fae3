"""Installed modules with a few lines changed, in memory: repairs of published ports, and bugs planted in them."""

import importlib
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import jax


@contextmanager
def implicit_promotion() -> Iterator[None]:
    """JAX's own promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@dataclass(frozen=True)
class Edit:
    """A changed line.

    Attributes:
      old: Its text, or a part of it.
      new: What takes its place.
      after: Text that comes earlier in the file, such as the line of the class: the next `old` is meant.
    """

    old: str
    new: str
    after: str = ""

    def at(self, source: str) -> int:
        """Where the old text is."""
        start = source.index(self.after) if self.after else 0
        return source.index(self.old, start)

    def line(self, source: str) -> int:
        """Number of the line where the old text starts."""
        return source.count("\n", 0, self.at(source)) + 1

    def __call__(self, source: str) -> str:
        """The source with the new text. Both have the same number of lines, so that the others keep theirs."""
        at = self.at(source)
        assert self.old.count("\n") == self.new.count("\n")
        return source[:at] + self.new + source[at + len(self.old) :]


def source_of(module: str) -> str:
    """The source of an installed module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        return file.read()


@contextmanager
def edited(module: str, edits: Sequence[Edit]) -> Iterator[None]:
    """Import a module with changes while this context is entered."""
    source, original = source_of(module), importlib.import_module(module)
    for edit in edits:
        source = edit(source)
    changed = ModuleType(module)
    changed.__dict__.update({name: getattr(original, name) for name in ("__file__", "__package__", "__spec__")})
    path = str(original.__file__)
    lines = (len(source), None, source.splitlines(keepends=True), path)
    # The one entry alone: what is imported meanwhile stays imported.
    sys.modules[module] = changed
    try:
        with mock.patch.dict(linecache.cache, {path: lines}):
            exec(compile(source, path, "exec"), changed.__dict__)
            yield
    finally:
        sys.modules[module] = original
