"""Errors that a user's own code raises, in one line."""

from pathlib import Path

from jaxtrain.errors import user_location
from jaxtrain.user_file import own_folders


def own_error(error: BaseException) -> str | None:
    """Return one line for an error that was raised in a user's file or below it; None for a bug of the harness.

    Args:
      error: Any exception.

    Returns:
      Where it was raised in the user's code, its kind and the first line of its message.

    >>> own_error(ValueError("three rows")) is None
    True
    """
    place = _syntax(error) or user_location(error)
    if place is None:
        return None
    # A syntax error's text repeats its place; str() of a KeyError is the repr of the key.
    text = error.msg if isinstance(error, SyntaxError) else str(error).strip()
    first = text.partition("\n")[0]
    return f"{place}: {type(error).__name__}{': ' * bool(first)}{first} (--debug shows the traceback)"


def _syntax(error: BaseException) -> str | None:
    """Return the place of an error in a file that cannot be compiled, which has no frame."""
    if not isinstance(error, SyntaxError) or error.filename is None:
        return None
    path = Path(error.filename)
    return f"{path.name}:{error.lineno}" if not own_folders().isdisjoint(path.parents) else None
