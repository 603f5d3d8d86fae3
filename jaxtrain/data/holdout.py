"""Which examples are held out for validation."""

import numpy as np
from numpy.typing import NDArray

from jaxtrain.errors import UserError

Labels = NDArray[np.int32]


def stratified_split(labels: Labels, fraction: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Sorted indices of (train, validation); a class of two or more has an example in each."""
    check_fraction(fraction)
    # RandomState's stream is frozen; default_rng's may change with numpy and move examples across the split.
    stream = np.random.RandomState(0)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out[stream.permutation(members)[: share(len(members), fraction)]] = True
    if not held_out.any():
        raise UserError(f"{len(labels)} examples leave none for validation: give two or more of some class")
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def random_split(count: int, fraction: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Sorted indices of (train, validation), out of `count` examples without labels."""
    check_fraction(fraction)
    if count < 2:
        raise UserError(f"{count} examples leave none for validation: give two or more")
    shuffled = np.random.RandomState(0).permutation(count)  # see above
    held_out = share(count, fraction)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def share(count: int, fraction: float) -> int:
    """`fraction` of `count`, but at least one and not all of them; none of one."""
    return min(max(1, round(count * fraction)), count - 1) if count else 0


def check_fraction(fraction: float) -> None:
    """Raises UserError for what is no fraction."""
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction is {fraction}: choose a number between 0 and 1")
