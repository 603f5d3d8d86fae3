"""Selection of the examples held out for validation."""

import numpy as np
from numpy.typing import NDArray

from jaxtrain.errors import UserError

Labels = NDArray[np.int32]


def stratified_split(labels: Labels, fraction: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return sorted indices of (train, validation); a class of two or more examples has one in each."""
    check_fraction(fraction)
    # RandomState's stream is frozen; default_rng's may change with numpy and change the split.
    stream = np.random.RandomState(0)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out[stream.permutation(members)[: share(len(members), fraction)]] = True
    if not held_out.any():
        raise UserError(f"{len(labels)} examples leave none for validation: some class needs two or more")
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def random_split(count: int, fraction: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return sorted indices of (train, validation) for `count` unlabeled examples."""
    check_fraction(fraction)
    if count < 2:
        raise UserError(f"{count} examples leave none for validation: two or more are needed")
    shuffled = np.random.RandomState(0).permutation(count)  # RandomState, as above
    held_out = share(count, fraction)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def share(count: int, fraction: float) -> int:
    """Return `fraction` of `count`, rounded: at least 1 and less than `count`, 0 for one example."""
    return min(max(1, round(count * fraction)), count - 1) if count else 0


def check_fraction(fraction: float) -> None:
    """Raise UserError for a fraction outside (0, 1)."""
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction must be in (0, 1), got {fraction}")
