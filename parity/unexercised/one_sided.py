"""The selections of which a case's first batches take one side only."""

from collections.abc import Callable, Iterator

from parity.case import Batch, Case
from parity.unexercised.jax_selections import watch_jax
from parity.unexercised.selections import Selections
from parity.unexercised.torch_selections import watch_torch

BATCHES = 3
"""Number of batches; later ones are drawn only while a selection takes one side."""
LISTED = 5
"""Number of selections that are named."""


def one_sided_selections(case: Case, seed: int = 0) -> list[str]:
    """Return a line for each selection of the PyTorch and of the JAX program that took one side only.

    Args:
      case: The case.
      seed: Seed of weights and data.

    Returns:
      The lines of the first selections, and their number if there are more.
    """
    lines = [*_watched(watch_torch, case, seed), *_watched(watch_jax, case, seed)]
    more = len(lines) - LISTED
    return [*lines[:LISTED], *([f"{more} more selections took one side only"] if more > 0 else [])]


def _watched(watch: Callable[[Case, Batch, int, Selections], None], case: Case, seed: int) -> Iterator[str]:
    selections = Selections()
    for batch in case.batches(seed, BATCHES):
        watch(case, batch, seed, selections)
        if not selections.one_sided:
            break
    return selections.lines()
