"""Timing two engines turn by turn, so that a throttled machine slows both alike."""

import time
from collections.abc import Mapping

import numpy as np

from benchmarks.engines import Step

WARM_UP, ROUNDS, TURN = 3, 30, 5
"""Steps before the clock; turns an engine gets; steps to a turn."""


def interleaved(steps: Mapping[str, Step]) -> dict[str, np.ndarray]:
    """Seconds [ROUNDS × TURN] of every step of every engine."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            for _ in range(TURN):
                begin = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(times) for name, times in seconds.items()}
