"""Values that depend on no parameter: positions, frequencies, buckets, windows. Each is one array of either program."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from parity.mutate.mutant import Mutant
from tests.parity.mutants.network import layered

LENGTH = 6
FREQUENCIES = np.array([1.0, 0.5])


class Encoded(nn.Module):
    """Attention in a window, with encoded positions and a bias by distance."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values of x[rows, length, 4]."""
        positions = torch.arange(LENGTH)
        angles = positions[:, None] * torch.tensor([1.0, 0.5])
        x = x * torch.cat([angles.cos(), angles.sin()], -1).expand(x.shape)
        distance = positions[:, None] - positions
        scores = x @ x.mT - torch.clamp(distance.abs(), max=1) / 7
        kept = (distance >= 0) & (distance < 3)
        return scores.masked_fill(~kept, -torch.inf).softmax(-1) @ x


def encoded(p: Any, x: Any, first: int = 0, far: int = 1, window: int = 3, frequencies: Any = FREQUENCIES) -> Any:
    """The same in JAX."""
    del p
    x = rotated(x, positions(first), frequencies)
    scores = x @ x.mT - buckets(far) / 7
    return jax.nn.softmax(jnp.where(kept(window), scores, -jnp.inf), -1) @ x


def positions(first: int) -> Any:
    """Positions, int[length]."""
    return first + jnp.arange(LENGTH)


def rotated(x: Any, positions: Any, frequencies: Any) -> Any:
    """Multiply by the cosines and sines of the positions."""
    angles = positions[:, None] * frequencies
    return x * jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def buckets(far: int) -> Any:
    """Buckets of the distances, int[length, length]."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    return jnp.minimum(jnp.abs(distance), far)


def kept(window: int) -> Any:
    """The mask of a causal window, bool[length, length]."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    return (distance >= 0) & (distance < window)


def _mutant(name: str, lines: Any, **wrong: Any) -> Mutant:
    def ours(p: Any, x: Any) -> Any:
        return encoded(p, x, **wrong)

    return Mutant(name, partial(layered, Encoded, ours, (LENGTH, 4)), CLEAN, "forward", "layer", lines)


CLEAN = partial(layered, Encoded, encoded, (LENGTH, 4))
MUTANTS = [
    _mutant("position-off-by-one", positions, first=1),
    _mutant("frequency-of-a-numpy-table", rotated, frequencies=np.array([1.0, 0.51])),
    _mutant("bucket-bound", buckets, far=2),
    _mutant("window-off-by-one", kept, window=2),
]
