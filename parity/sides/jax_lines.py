"""The lines of the user's program that the equations of a jaxpr come from."""

import functools
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from jax.extend.core import JaxprEqn

import jaxtrain
from jaxtrain.program import recorded_values
from jaxtrain.program.recorded_values import Inside
from parity.source import is_of_harness

REWRITES = tuple(Path(jaxtrain.__file__).parent / folder for folder in ("passes", "program", "labs"))

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def line_of(eqn: JaxprEqn, inside: Inside = ()) -> tuple[str, int] | None:
    """Return the line of the model, the loss or the optimizer that an equation comes from."""
    folder = _FOLDER.get()
    return recorded_values.line_of(eqn, inside, is_of_user if folder is None else functools.partial(_is_in, folder))


_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def lines_in(folder: Path) -> Iterator[None]:
    """Take the lines of files in a folder alone for those of the user while entered: what they call is a library.

    Args:
      folder: The folder.
    """
    before = _FOLDER.set(folder.resolve())
    try:
        yield
    finally:
        _FOLDER.reset(before)


@functools.cache
def _is_in(folder: Path, file: str) -> bool:
    return Path(file).resolve().is_relative_to(folder)


def libraries() -> tuple[Path, ...]:
    """Return the folders of imported packages that rarely cause a difference: their caller's line identifies it."""
    imported = (sys.modules.get(name) for name in ("jax", "flax", "optax", "equinox"))
    return tuple(Path(folder) for package in imported if package is not None for folder in package.__path__)


@functools.cache
def is_of_user(file: str) -> bool:
    """Return whether a file is neither of the harness nor of a library."""
    path = Path(file)
    ours = is_of_harness(file) or path.parent in REWRITES or any(path.is_relative_to(part) for part in libraries())
    return path.is_absolute() and not ours and not is_of_python(file)


def is_of_python(file: str) -> bool:
    """Return whether a file is of Python's standard library, as contextlib is, through which decorators call.

    >>> import contextlib, numpy
    >>> is_of_python(contextlib.__file__), is_of_python(numpy.__file__)
    (True, False)
    """
    path = Path(file)
    return path.is_relative_to(STANDARD_LIBRARY) and not {"site-packages", "dist-packages"} & {*path.parts}
