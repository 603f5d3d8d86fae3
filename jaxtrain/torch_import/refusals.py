"""Errors of an import, with the line of PyTorch code that causes them and the remedy."""

import functools
import importlib.util
import os
import re

from jaxtrain.errors import UserError, format_location

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)(?:\n {4,}(?P<code>.*))?')


def source_line(stack_trace: str | None) -> str:
    """Return the last line of the user's code in a PyTorch stack trace, as "model.py:12: y = F.gelu(x)".

    >>> source_line('File "/home/me/torch/model.py", line 12, in forward\\n    y = F.gelu(x)\\n')
    'model.py:12: y = F.gelu(x)'
    >>> source_line(None)
    ''
    """
    frames = [match.groupdict() for match in _FRAME.finditer(stack_trace or "")]
    own = [frame for frame in frames if not is_internal(frame["file"])]
    # Of a module that consists of PyTorch's own parts alone, the line in one of these.
    own = own or [frame for frame in frames if frame["file"].startswith(os.path.join(_torch(), "nn", ""))]
    if not own:
        return ""
    location, code = format_location(own[-1]["file"], int(own[-1]["line"])), own[-1]["code"]
    return f"{location}: {code.strip()}" if code else location


def refusal(problem: str, remedy: str, source: str = "") -> UserError:
    """Return the error that a module cannot be imported."""
    at = f" ({source})" if source else ""
    return UserError(f"{problem}{at}: {remedy}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@functools.cache
def is_internal(file: str) -> bool:
    """Return whether a file is PyTorch's or one of these, through which `torch.autograd.Function` is called."""
    is_interactive = file.startswith(("<stdin>", "<ipython-input"))
    return (file.startswith((_torch(), "<")) and not is_interactive) or "/jaxtrain/torch_import/" in file


@functools.cache
def _torch() -> str:
    """Return the folder of the package, without an import."""
    spec = importlib.util.find_spec("torch")
    return os.path.join(os.path.dirname(spec.origin), "") if spec is not None and spec.origin else "/torch/"
