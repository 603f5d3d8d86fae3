"""Lines of source code in reports."""

import linecache
import sys
from pathlib import Path


def source_line(file: str, line: int) -> str:
    """Return file, line number and text of a line.

    >>> source_line(linecache.__file__, 1).startswith("linecache.py:1: ")
    True
    """
    text = linecache.getline(file, line).strip()
    return f"{import_path(file)}:{line}: {text}" if text else f"{import_path(file)}:{line}"


def import_path(file: str) -> str:
    """Return the path of a file relative to its entry in `sys.path`.

    >>> import_path(linecache.__file__)
    'linecache.py'
    """
    roots = sorted((str(Path(root).resolve()) for root in sys.path), key=len, reverse=True)
    return next((file[len(root) + 1 :] for root in roots if file.startswith(f"{root}/")), file)
