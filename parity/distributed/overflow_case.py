"""A case that overflows on one device, created by a function that other processes can import."""

from dataclasses import replace

import numpy as np

from parity.case import Batch, Case
from parity.cases.built_in import mlp_case


def overflowing_mlp(pixel: float) -> Case:
    """Return an MLP 16-16-10; in about a third of the batches one image, and so one device, contains the given
    pixel."""
    case = mlp_case.case(side=4, hidden=16)

    def batch(seed: int, rows: int) -> Batch:
        drawn = dict(case.batch(seed, rows))
        rng = np.random.default_rng([seed, 1])
        if rng.random() < 1 / 3:
            drawn["image"][rng.integers(rows), 0, 0] = pixel
        return drawn

    # Between the smallest and the largest gradient norm.
    return replace(case, batch=batch, rows=16, clip_norm=0.62)
