"""Why PyTorch's own loss may be inf or NaN."""

from collections.abc import Mapping

import numpy as np


def cause_of_nonfinite(batch: Mapping[str, np.ndarray]) -> str:
    """Describe why the loss of a batch may be inf or NaN.

    >>> cause_of_nonfinite({"x": np.array([np.nan])})
    'x of the batch has NaN: leave such rows out'
    """
    nan = [name for name, x in batch.items() if x.dtype.kind == "f" and np.isnan(x).any()]
    return f"{nan[0]} of the batch has NaN: leave such rows out" if nan else "look for a division, log or root of 0"
