"""Exceptions whose message is addressed to the user, and tracebacks that show the user's own lines."""

import functools
import inspect
import json
import os
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast


class UserError(Exception):
    """A mistake that the user can fix. The message is one line: what is wrong and the remedy. The CLI exits with 2."""

    exit_status = 2


class RunFailed(UserError):  # noqa: N818
    """A valid request that failed. The CLI exits with 1."""

    exit_status = 1


def escape_unprintable(text: str) -> str:
    """Return a text that may come from a file, for a terminal: one line, in which control characters are escaped.

    >>> escape_unprintable("lr 0.1\\x1b]0;title\\x07")
    'lr 0.1\\\\x1b]0;title\\\\x07'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# What a shell runs, or a flag with its value: a quoted text, a number, a placeholder, or the last word of a clause.
_IN_SHELL = r"(?P<command>\b(?:jaxtrain|parity|python|pip|docker) [^;,()]*)"
_VALUE = r"'[^']*'|[\d.]+(?:e[+-]?\d+)?(?![\w.])|[A-Z]\w*\b|(?!(?:and|or)\b)\w[\w=]*(?=$|[,;:)]| --| or )"
_FLAG = re.compile(
    rf"{_IN_SHELL}|(?<![\w=-])--(?P<no>no-)?(?P<name>[a-z][a-z\d-]*)(?: (?P<value>{_VALUE}))?(?P<next> --)?"
)


def in_python(message: str) -> str:
    """Return a message with the flags that it names as arguments in Python; commands of a shell stay as they are.

    >>> in_python("continue it with --resume, or choose another --out")
    'continue it with resume=True, or choose another out'
    >>> in_python("use --precision bf16 --accumulate 2; jaxtrain report --out page.html writes it")
    "use precision='bf16', accumulate=2; jaxtrain report --out page.html writes it"
    """

    def argument(found: re.Match[str]) -> str:
        if found["command"]:
            return found[0]
        name, value = found["name"].replace("-", "_"), found["value"]
        if value is None:
            value = "False" if found["no"] else "True" if name == "resume" else None
        elif (value.islower() and value.isidentifier()) or ("=" in value and value[0] != "'"):
            value = repr(value)
        return (name if value is None else f"{name}={value}") + (", --" if found["next"] else "")

    before = None
    while before != message:  # each pass leaves the flag after another one
        before, message = message, _FLAG.sub(argument, message)
    return message


def reason(error: Exception) -> str:
    """Return in words why a file cannot be read or written, for the parentheses of a message.

    >>> reason(FileNotFoundError(2, "No such file or directory")), reason(KeyError("settings"))
    ('No such file or directory', 'it has no settings')
    """
    match error:
        case OSError():
            return error.strerror or str(error) or "the operating system refuses"
        case json.JSONDecodeError():
            return f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        case UnicodeError():
            return "it is not UTF-8 text"
        case RecursionError():
            return "it is nested too deeply"
        case KeyError():
            return f"it has no {error.args[0] if error.args else 'such entry'}"
        case TypeError() | AttributeError():
            return "it has another structure"
    return str(error).partition("\n")[0] or "it is malformed"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is Python's MemoryError or XLA's `absl::StatusCode::kResourceExhausted`."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


_F = TypeVar("_F", bound=Callable[..., Any])


def user_facing(fn: _F) -> _F:
    """Raise the errors of a function with the traceback of `with_user_frames`, and `UserError` for wrong names."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise with_user_frames(error)  # noqa: B904
            names = [name for name in inspect.signature(fn).parameters if name != "self"]
            raise UserError(f"{error}: the arguments are {', '.join(names)}") from None
        except Exception as error:
            raise with_user_frames(error)  # noqa: B904

    return cast(_F, call)


def with_user_frames(error: Exception) -> Exception:
    """Remove the frames of JAX and of this project from an error's traceback, for the function that catches it to raise
    it again.

    A `UserError` keeps the user's frames alone, and an error of another package also that package's. An error of this
    project keeps all frames after the user's last one. With `JAX_TRACEBACK_FILTERING=off` everything is kept.
    """
    # The frame of the caller, which raising adds again.
    frames = list(_frames(error.__traceback__))[1:]
    if _filters_tracebacks():
        last = max((i for i, frame in enumerate(frames) if _is_user_code(_file(frame))), default=-1)
        if isinstance(error, UserError):
            if sys.excepthook is sys.__excepthook__:
                sys.excepthook = _show_up_to_user_line
            # Functions that a library compiles from text are of no module.
            of_modules = (frame for frame in frames if "__name__" in frame.tb_frame.f_globals)
            frames = [frame for frame in of_modules if _is_user_code(_file(frame))]
            error.__cause__, error.__suppress_context__ = None, True
            if hasattr(error, "__notes__"):
                error.__notes__ = [note for note in error.__notes__ if "JAX has removed" not in note]
        else:
            is_own = any(_file(frame).startswith(_OURS) for frame in frames[last + 1 :])
            frames = [frame for i, frame in enumerate(frames) if (is_own and i > last) or not _is_internal(frame)]
    return error.with_traceback(_linked(frames))


def _show_up_to_user_line(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """`sys.excepthook`: print a `UserError` without this project's frames at its end, which raising it again adds."""
    frames = list(_frames(trace))
    while isinstance(error, UserError) and frames and _file(frames[-1]).startswith(_OURS):
        frames.pop()
    trace = _linked(frames)
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _linked(frames: list[types.TracebackType]) -> types.TracebackType | None:
    traceback = None
    for frame in reversed(frames):
        traceback = types.TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return traceback


def user_location(error: BaseException) -> str | None:
    """Return the last line of the user's code in an error's traceback, as "loss.py:12"; None if there is none."""
    frames = [frame for frame in _frames(error.__traceback__) if _is_user_code(_file(frame))]
    return format_location(_file(frames[-1]), frames[-1].tb_lineno) if frames else None


def traced_location(traceback: Any) -> str | None:
    """Return the line of the user's code that an operation was traced from, by JAX's traceback, as "loss.py:12"."""
    frames = [] if traceback is None else traceback.frames
    user_frames = (frame for frame in frames if _is_user_code(frame.file_name))
    return next((format_location(frame.file_name, frame.line_num) for frame in user_frames), None)


def format_location(file: str, line: int) -> str:
    """Format a line of a file, or of a notebook's cell, whose file has a meaningless name.

    >>> format_location("/home/me/loss.py", 12), format_location("/tmp/ipykernel_7/123.py", 12)
    ('loss.py:12', 'cell line 12')
    """
    is_cell = "ipykernel_" in file or file.startswith("<ipython-input")
    return f"cell line {line}" if is_cell else f"{Path(file).name}:{line}"


def warn_user(message: str) -> None:
    """Issue a warning that names the user's line which led to it."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and not _is_user_code(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


_OURS = tuple(f"{Path(__file__).parents[1] / program}{os.sep}" for program in ("jaxtrain", "parity", "benchmarks"))
_LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def _is_user_code(file: str) -> bool:
    return not file.startswith((*_OURS, *_LIBRARIES)) and "-packages/" not in file


def _is_internal(frame: types.TracebackType) -> bool:
    package = frame.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    # JAX and this project use context managers as decorators.
    return package in ("jax", "jaxlib", "contextlib") or _file(frame).startswith(_OURS)


def _frames(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _file(frame: types.TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _filters_tracebacks() -> bool:
    # Errors may arise before JAX is imported, and this module is imported first.
    jax = sys.modules.get("jax")
    return jax is None or jax.config.jax_traceback_filtering != "off"
