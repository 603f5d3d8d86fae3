"""Slopes at kinks and ties, where frameworks choose different values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from parity.mutate.mutant import Mutant
from tests.parity.mutants.network import Call, layered


def corners(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw -1, 0 and 1: values at kinks, many of them equal."""
    return rng.integers(-1, 2, size=shape).astype(np.float32)


def mutant(name: str, theirs: Callable[[Tensor], Tensor], right: Any, wrong: Any) -> Mutant:
    """A mutant with `wrong` in place of `right`, which has the same values but other gradients."""
    layer = partial(Call, theirs)
    alone = [lambda p, x, f=f: f(x) for f in (wrong, right)]
    case, clean = (partial(layered, layer, f, (6,), corners, "shift") for f in alone)
    return Mutant(name, case, clean, "forward|backward", "layer|Net|loss")


def absolute(x: Any) -> Any:
    """|x| with slope 0 at 0."""
    return x * jnp.sign(x)


def leaky(x: Any) -> Any:
    """LeakyReLU(0.1) with slope 0.1 at 0."""
    return jnp.where(x > 0, x, 0.1 * x)


def held(x: Any) -> Any:
    """x clamped to [0, 1] with slope 1 at both bounds."""
    return jnp.where((x >= 0) & (x <= 1), x, jax.lax.stop_gradient(jnp.clip(x, 0, 1)))


def inside(x: Any) -> Any:
    """x clamped to [-1, 1] with slope 0 at both bounds."""
    return jnp.where((x > -1) & (x < 1), x, jax.lax.stop_gradient(jnp.clip(x, -1, 1)))


def first_largest(x: Any) -> Any:
    """Twice the maximum of each row, with the gradient at its first occurrence."""
    return 2 * jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1)


def lower_median(x: Any) -> Any:
    """The lower median of each row of six."""
    return jnp.sort(x, -1)[:, 2:3]


MUTANTS = [
    mutant("abs-at-0", torch.abs, absolute, jnp.abs),
    mutant(
        "leaky-relu-at-0",
        partial(torch.nn.functional.leaky_relu, negative_slope=0.1),
        leaky,
        lambda x: jax.nn.leaky_relu(x, 0.1),
    ),
    mutant("clamp-at-its-ends", lambda x: x.clamp(0, 1), held, lambda x: jnp.minimum(jnp.maximum(x, 0.0), 1.0)),
    mutant("hardtanh-at-its-ends", torch.nn.functional.hardtanh, inside, jax.nn.hard_tanh),
    mutant("relu-at-0", torch.relu, jax.nn.relu, lambda x: jnp.maximum(x, 0.0)),
    mutant(
        "max-of-equals", lambda x: 2 * x.max(-1, keepdim=True)[0], first_largest, lambda x: 2 * x.max(-1, keepdims=True)
    ),
    mutant(
        "amax-of-equals", lambda x: 2 * x.amax(-1, keepdim=True), lambda x: 2 * x.max(-1, keepdims=True), first_largest
    ),
    mutant(
        "median-of-an-even-number",
        lambda x: (x + torch.arange(6) / 8).median(-1, keepdim=True)[0],
        lambda x: lower_median(x + np.arange(6, dtype=np.float32) / 8),
        lambda x: jnp.median(x + np.arange(6, dtype=np.float32) / 8, -1, keepdims=True),
    ),
    mutant(
        "norm-of-zeros",
        lambda x: (0 * x).norm(dim=-1, keepdim=True) + x,
        lambda x: 0 * x + x,
        lambda x: jnp.sqrt(jnp.square(0 * x).sum(-1, keepdims=True)) + x,
    ),
]
