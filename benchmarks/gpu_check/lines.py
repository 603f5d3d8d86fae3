"""Results as JSON lines on standard output, one at a time, so that an interrupted part keeps those before."""

import json
import sys
from typing import Any

import numpy as np


def emit(what: str, **figures: Any) -> None:
    """Print a result.

    Args:
      what: What was measured or checked; results of one kind become a table.
      **figures: The figures. Names that begin with "predicted" are of predictions, all others are measured.

    Example:
      >>> emit("copy", per_s=np.float32(2.0), shape=(2, 3))
      {"what": "copy", "per_s": 2.0, "shape": [2, 3]}
    """
    print(json.dumps({"what": what, **figures}, default=_number), flush=True)


def _number(x: Any) -> Any:
    """Return an array or a scalar of NumPy or JAX as JSON has it."""
    return np.asarray(x).tolist()


def note(text: str) -> None:
    """Print a line of progress, which is no result."""
    print(text, file=sys.stderr, flush=True)
