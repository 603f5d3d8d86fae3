"""The text of a file as `ruff format` lays it out."""

import importlib.util
import subprocess
import sys

from jaxtrain.errors import UserError

WIDTH = 88
"""Characters of a line: the default of ruff and black."""


def formatted(text: str) -> str:
    """Return Python code with lines of at most 88 characters.

    Raises:
      UserError: ruff is not installed.

    Example:
      >>> formatted("x = {'a':1}")
      'x = {"a": 1}\\n'
    """
    if importlib.util.find_spec("ruff") is None:
        raise UserError("the source of a model is formatted by ruff, which is not installed: pip install ruff")
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDTH}", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
