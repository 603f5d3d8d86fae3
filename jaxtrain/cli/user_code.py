"""Tracebacks of errors that a user's own file raises."""

import sys
import sysconfig
import traceback
from collections.abc import Set
from pathlib import Path

from jaxtrain.user_file import own_folders

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def print_own_traceback(error: Exception) -> bool:
    """Print an error's traceback from the first frame of a user's file on.

    Args:
      error: An exception that a command caught.

    Returns:
      Whether a user's file took part; otherwise nothing is printed.
    """
    folders = own_folders()
    first = error.__traceback__
    while first is not None and not _is_own(first.tb_frame.f_code.co_filename, folders):
        first = first.tb_next
    # A file that cannot be compiled has no frame.
    if first is None and not (isinstance(error, SyntaxError) and _is_own(error.filename or "", folders)):
        return False
    error.__notes__ = [note for note in getattr(error, "__notes__", ()) if "JAX has removed" not in note]
    sys.stderr.write("".join(traceback.format_exception(type(error), error, first)))
    return True


def _is_own(file: str, folders: Set[Path]) -> bool:
    is_library = file.startswith((_OURS, *_LIBRARIES)) or "-packages/" in file
    return not is_library and not folders.isdisjoint(Path(file).parents)
