"""How `torch.export` traces a module: quietly, with whole stack traces, without what a graph would silently lose."""

import contextlib
import functools
import logging
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint

from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.module.reached import GLOBAL, is_library, same_state
from jaxtrain.torch_import.capture.replaced import replaced
from jaxtrain.torch_import.capture.traceable_functions import FUNCTIONS
from jaxtrain.torch_import.capture.values.bincount import BINCOUNT
from jaxtrain.torch_import.capture.values.extremes import EXTREMES
from jaxtrain.torch_import.capture.values.finite import AssumedFinite
from jaxtrain.torch_import.capture.values.known_values import KNOWN_VALUES
from jaxtrain.torch_import.capture.values.outside import OUTSIDE, WithoutSeconds
from jaxtrain.torch_import.capture.values.questions import QUESTIONS
from jaxtrain.torch_import.capture.values.row_selections import SELECTIONS
from jaxtrain.torch_import.capture.values.unique import UNIQUE
from jaxtrain.torch_import.refusals import is_internal, refusal, source_line
from jaxtrain.torch_internals import export_trace

_REPLACEMENTS = (*FUNCTIONS, *KNOWN_VALUES, *BINCOUNT, *QUESTIONS, *SELECTIONS, *UNIQUE, *EXTREMES, *OUTSIDE)


class Traced:
    """What happened while a module was traced.

    Attributes:
      draws: Whether it drew from the global random numbers of Python and NumPy.
    """

    draws = False


@contextlib.contextmanager
def tracing() -> Iterator[Traced]:
    """Trace as this module describes while entered.

    Raises:
      UserError: The module caught an error that only tracing raises.
    """
    # Checks of values, which a graph cannot contain.
    unchecked = replaced(torch.distributions.Distribution, "_validate_args", False)
    traced, states = Traced(), [x.state for x in GLOBAL]
    with quiet(), _whole_stack_traces(), _without_randomness(), unchecked, contextlib.ExitStack() as patches:
        for owner, name, function in _REPLACEMENTS:
            patches.enter_context(replaced(owner, name, function))
        patches.enter_context(replaced(torch.nn.Parameter, "__new__", _new_parameter))
        patches.enter_context(WithoutSeconds())
        patches.enter_context(AssumedFinite())
        errors = patches.enter_context(_errors_of_values())
        yield traced
    if errors:
        raise errors[0]
    traced.draws = not all(same_state(x.state, state) for x, state in zip(GLOBAL, states, strict=True))


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Answer the user's code that nothing is compiled or exported while entered: it computes what PyTorch computes.

    Installed packages are answered that it is: they avoid what a graph cannot contain.
    """
    flags = torch.compiler
    with replaced(flags, "_is_compiling_flag", _Hidden()), replaced(flags, "_is_exporting_flag", _Hidden()):
        yield


class _Hidden:
    """The flag that `is_compiling` and `is_exporting` return: it is read where their caller decides by it."""

    def __bool__(self) -> bool:
        return is_library(sys._getframe(1).f_code.co_filename)


def _read(name: str) -> Callable[[_Hidden, Any], Any]:
    return lambda _, other: getattr(is_library(sys._getframe(1).f_code.co_filename), name)(other)


for _name in ("__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__", "__eq__", "__ne__"):
    setattr(_Hidden, _name, _read(_name))


@contextlib.contextmanager
def _errors_of_values() -> Iterator[list[UserError]]:
    """List the errors of code that reads the value of a tensor, which it may catch to do something else."""
    errors: list[UserError] = []

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                return read(*args, **kwargs)
            except Exception:
                if not is_internal(sys._getframe(1).f_code.co_filename):
                    stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
                    errors.append(
                        refusal(
                            "a tensor's value is read within try, and while tracing there is none",
                            "use torch.where in place of try",
                            source_line(stack),
                        )
                    )
                raise

        return observed

    with contextlib.ExitStack() as patches:
        for owner in (torch.Tensor, torch.SymBool, torch.SymInt, torch.SymFloat):
            for name in _READING:
                if hasattr(owner, name):
                    patches.enter_context(replaced(owner, name, reading(getattr(owner, name))))
        yield errors


_READING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out the warnings and logs that `torch.export` writes about its own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    # Of a failure it prints the graph to stderr.
    vars(export_trace)["print"] = lambda *_, **__: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        vars(export_trace).pop("print", None)


@contextlib.contextmanager
def _whole_stack_traces() -> Iterator[None]:
    """Record the lines of functions that `forward` calls as well; newer versions record those of `forward` only.

    Of PyTorch's own, calls of layers and checkpoints are recorded: to write out the others takes longer than they help.
    """
    if not hasattr(torch.fx.proxy.TracerBase, "_filter_traceback_frames"):
        yield
        return

    def from_forward(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        read = (x for x in frames[first:] if not is_internal(x.filename) or x.filename.startswith(_LAYERS))
        return traceback.StackSummary.from_list([*read])

    with replaced(torch.fx.proxy.TracerBase, "_filter_traceback_frames", from_forward):
        yield


_LAYERS = (os.path.dirname(torch.nn.__file__), torch.utils.checkpoint.__file__)


@contextlib.contextmanager
def _without_randomness() -> Iterator[None]:
    """Refuse random numbers that would be drawn once, at the capture, and seeds, which a graph cannot contain."""
    with contextlib.ExitStack() as patches:
        for owner, label, names in _RANDOM:
            for name in names:
                patches.enter_context(replaced(owner, name, _refusing(getattr(owner, name), f"{label}.{name}")))
        patches.enter_context(replaced(torch, "Generator", _NewGenerator))
        yield


def _new_parameter(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a parameter, as PyTorch makes them while it traces; refuse one that `forward` makes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if is_internal(frame.f_code.co_filename):
        return _parameter(cls, *args, **kwargs)
    stack = "".join(traceback.format_list(traceback.extract_stack(frame)))
    raise refusal(
        "a parameter that is made inside forward is another one in each call", "make it in __init__", source_line(stack)
    )


_parameter = torch.nn.Parameter.__new__
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


class _Generators(type):
    """The class of `torch.Generator` while tracing, which knows those that were made before."""

    generator = torch.Generator

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_internal(sys._getframe(1).f_code.co_filename):
            return cls.generator(*args, **kwargs)
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
        raise refusal(
            "a torch.Generator that is made inside forward draws the same numbers in each call",
            "make it in __init__, or numbers of a fixed seed as a buffer",
            source_line(stack),
        )

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.generator)


class _NewGenerator(metaclass=_Generators):
    """`torch.Generator` while tracing."""


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    problem, remedy = f"{name} would be drawn once, at the import", "use torch.rand or dropout"
    if name in _SEEDING:
        problem, remedy = f"{name} inside forward", "seed before the run: a step has a key of its own"

    def draw(*args: Any, **kwargs: Any) -> Any:
        if is_internal(sys._getframe(1).f_code.co_filename):
            return function(*args, **kwargs)
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
        error = refusal(problem, remedy, source_line(stack))
        if (name in _UNIT and not args) or (name in _UNIFORM and args == (0, 1)):
            return _Drawn(error)
        raise error

    return draw


def _functions(numbers: Any) -> list[str]:
    """Return the names of the functions that draw random numbers."""
    names = (name for name in dir(numbers) if not name.startswith("_") and name not in ("getstate", "get_state"))
    return [name for name in names if callable(getattr(numbers, name))]


_RANDOM: tuple[tuple[Any, str, list[str]], ...] = (
    (random, "random", [name for name in _functions(random._inst) if hasattr(random, name)]),
    (np.random, "numpy.random", [name for name in _functions(np.random.mtrand._rand) if hasattr(np.random, name)]),
    (np.random, "numpy.random", ["default_rng"]),
    (torch, "torch", ["manual_seed", "seed", "set_rng_state"]),
    (torch.random, "torch.random", ["manual_seed", "seed", "set_rng_state", "fork_rng"]),
)
"""What draws or seeds random numbers."""
_SEEDING = frozenset(
    f"{label}.{name}" for owner, label, names in _RANDOM if label.startswith("torch") for name in names
)
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
