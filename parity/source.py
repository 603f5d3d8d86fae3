"""A line of source code, as reports name it."""

import linecache
import sys
from pathlib import Path


def described(file: str, line: int) -> str:
    """The file as it is imported, the line and its text.

    >>> described(linecache.__file__, 1).startswith("linecache.py:1: ")
    True
    """
    text = linecache.getline(file, line).strip()
    return f"{imported(file)}:{line}: {text}" if text else f"{imported(file)}:{line}"


def imported(file: str) -> str:
    """A file's path from where it is imported.

    >>> imported(linecache.__file__)
    'linecache.py'
    """
    roots = sorted((str(Path(root).resolve()) for root in sys.path), key=len, reverse=True)
    return next((file[len(root) + 1 :] for root in roots if file.startswith(f"{root}/")), file)
