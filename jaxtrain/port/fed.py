"""Whether a script gives the batches of a ported run: without its model, and as they were recorded."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.port.data import ScriptBatches
from jaxtrain.port.recipe_source import INPUTS
from jaxtrain.port.refused import refused_at
from jaxtrain.port.training import Training

SHIFT = 0.25
"""What is added to the numbers that modules return, in one of two runs."""


def check_fed(training: Training, script: Path, args: Sequence[str], folder: Path) -> None:
    """Compare what a script gives for two kinds of answers of its modules, for as many updates as were recorded.

    Args:
      training: What the script is.
      script: The script.
      args: Its arguments.
      folder: The folder with the file of its inputs.

    Raises:
      UserError: It gives other batches if its modules compute something else, or in every run.
    """
    runs = [ScriptBatches(script, args, folder / INPUTS, shift=shift) for shift in (0.0, SHIFT)]
    streams = [run.__iter__() for run in runs]
    pool = ThreadPoolExecutor()  # both processes start at once
    try:
        for update in (update for update, window in training.windows() for _ in window):
            one, two = pool.map(_next, streams)
            for name in {**one, **two}:
                if name not in one or name not in two or not np.array_equal(one[name], two[name], equal_nan=True):
                    raise refused_at(
                        f"{name} depends on what the model computes, or differs from run to run",
                        update.backwards[0].line,
                        "seed all random numbers, and compute it from the data alone",
                    )
    finally:
        pool.shutdown()
        for stream in streams:
            stream.close()


def _next(stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return next(stream, {})
