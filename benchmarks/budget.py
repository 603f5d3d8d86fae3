"""The time limit of a benchmark: its division among parts, and work reduced to fit in the remaining time."""

import time
from collections.abc import Callable, Sequence


class OutOfTime(Exception):  # noqa: N818
    """A worker did not answer within its time limit."""


class Budget:
    """Seconds counted down by a clock.

    Args:
      seconds: The limit.
      clock: Returns the current time in seconds.
      remedy: What a line on skipped work ends with.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        remedy: str = "; for more time use --minutes",
    ) -> None:
        self.clock, self.remedy = clock, remedy
        self.deadline = clock() + seconds

    def remaining(self) -> float:
        """Return the seconds left, 0 after the deadline."""
        return max(0.0, self.deadline - self.clock())

    def share(self, parts_left: int) -> "Budget":
        """Return the budget of the next of `parts_left` parts: up to twice its fair share.

        Parts that need less leave the difference to those after them, and the last one may use all that is left.
        """
        return Budget(self.remaining() * 2 / (parts_left + 1), self.clock, self.remedy)


def select_jobs(seconds_per_turn: Sequence[float], limit_s: float) -> list[int]:
    """Return the indices of the jobs of which one turn each fits in `limit_s`, dropping the slowest first.

    >>> select_jobs([1.0, 3.0], limit_s=9.0)
    [0, 1]
    >>> select_jobs([1.0, 300.0, 2.0], limit_s=9.0)
    [0, 2]
    """
    jobs = list(range(len(seconds_per_turn)))
    while sum(seconds_per_turn[i] for i in jobs) > limit_s:
        jobs.remove(max(jobs, key=lambda i: seconds_per_turn[i]))
    return jobs


def fit_side(call_seconds: Callable[[int], float], largest: int, limit_s: float) -> int:
    """Return the largest side whose matrix product is predicted to take at most `limit_s`.

    Args:
      call_seconds: Measures one product of square matrices with the given side.
      largest: Upper bound, a power of two of at least 128.
      limit_s: Bound of a call's seconds; a side twice as large takes eight times as long.

    Returns:
      A power of two from 128 to `largest`.
    """
    side = 128
    while side < largest and 8 * call_seconds(side) <= limit_s:
        side *= 2
    return side
