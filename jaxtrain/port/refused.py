"""Scripts that cannot be carried over: one line, with the place in the script and a remedy."""

from jaxtrain.errors import UserError, format_location
from jaxtrain.torch_import import Line


def refused_at(problem: str, line: Line | None, remedy: str) -> UserError:
    """Return the error of a script that cannot be carried over, with its line."""
    at = f" ({format_location(line.file, line.number)})" if line is not None else ""
    return UserError(f"{problem}{at}: {remedy}")


class Stop(BaseException):
    """Ends a script, past its own `except Exception`."""


class Refused(Stop):
    """Ends a script that cannot be carried over.

    Attributes:
      error: The error for the user.
    """

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error
