"""How `torch.export` traces a module: quietly, with whole stack traces, without what a graph would silently lose."""

import contextlib
import inspect
import logging
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.export import _trace

from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.bincount import BINCOUNT
from jaxtrain.torch_import.capture.finite import AssumedFinite
from jaxtrain.torch_import.capture.functions import FUNCTIONS
from jaxtrain.torch_import.capture.known_values import KNOWN_VALUES
from jaxtrain.torch_import.refusals import refusal, source_line


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace as this module describes while entered."""
    # Checks of values, which a graph cannot contain.
    unchecked = replaced(torch.distributions.Distribution, "_validate_args", False)
    with _quiet(), _whole_stack_traces(), _without_python_randomness(), unchecked, contextlib.ExitStack() as patches:
        for owner, name, function in (*FUNCTIONS, *KNOWN_VALUES, *BINCOUNT):
            patches.enter_context(replaced(owner, name, function))
        patches.enter_context(AssumedFinite())
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warnings and logs that `torch.export` writes about its own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    # Of a failure it prints the graph to stderr.
    vars(_trace)["print"] = lambda *_, **__: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        vars(_trace).pop("print", None)


@contextlib.contextmanager
def _whole_stack_traces() -> Iterator[None]:
    """Record the lines of functions that `forward` calls as well; newer versions record those of `forward` only."""
    if not hasattr(torch.fx.proxy.TracerBase, "_filter_traceback_frames"):
        yield
        return

    def from_forward(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return traceback.StackSummary.from_list(frames[first:])

    with replaced(torch.fx.proxy.TracerBase, "_filter_traceback_frames", from_forward):
        yield


@contextlib.contextmanager
def _without_python_randomness() -> Iterator[None]:
    """Refuse Python's and NumPy's random numbers, which would be drawn once, at the capture."""

    def refusing(name: str) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
            error = refusal(
                f"{name} would be drawn once, at the import", "use torch.rand or dropout", source_line(stack)
            )
            if (name in _UNIT and not args) or (name in _UNIFORM and args == (0, 1)):
                return _Drawn(error)
            raise error

        return draw

    with contextlib.ExitStack() as patches:
        for module, label in ((random, "random"), (np.random, "numpy.random")):
            for name in ("random", "randint", "uniform", "choice", "shuffle", "rand", "randn", "normal"):
                if hasattr(module, name):
                    patches.enter_context(replaced(module, name, refusing(f"{label}.{name}")))
        yield


_UNIT = ("random.random", "numpy.random.random", "numpy.random.rand", "numpy.random.uniform")
_UNIFORM = ("random.uniform", "numpy.random.uniform")


class _Drawn:
    """A number in [0, 1) that only comparisons with 0 and 1 may read, as LayerDrop's with a rate of 0."""

    def __init__(self, error: UserError) -> None:
        self._error = error

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, int | float) and not 0 < other < 1:
            return other >= 1
        raise self._error

    def __gt__(self, other: Any) -> bool:
        if isinstance(other, int | float) and other >= 1:
            return False
        raise self._error

    def _refused(self, *_: Any) -> Any:
        raise self._error

    __float__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __le__ = __ge__ = _refused


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while entered."""
    inherited = isinstance(owner, type) and name not in vars(owner)
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
