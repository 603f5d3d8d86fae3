"""Gradients where a function has none: each framework chose a value, and often another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from parity.mutants.mutant import Mutant
from parity.mutants.network import Call, layered


def corners(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """-1, 0 and 1: on the corners, and equal to each other."""
    return rng.integers(-1, 2, size=shape).astype(np.float32)


def mutant(name: str, theirs: Callable[[Tensor], Tensor], right: Any, wrong: Any) -> Mutant:
    """`wrong` of the same values, with other gradients."""
    layer = partial(Call, theirs)
    alone = [lambda p, x, f=f: f(x) for f in (wrong, right)]
    case, clean = (partial(layered, layer, f, (6,), corners, "shift") for f in alone)
    return Mutant(name, case, clean, "forward|backward", "layer|Net|loss")


def absolute(x: Any) -> Any:
    """|x|, its gradient 0 at 0."""
    return x * jnp.sign(x)


def leaky(x: Any) -> Any:
    """LeakyReLU(0.1), its gradient 0.1 at 0."""
    return jnp.where(x > 0, x, 0.1 * x)


def held(x: Any) -> Any:
    """Held to 0 and 1, its gradient 1 on both."""
    return jnp.where((x >= 0) & (x <= 1), x, jax.lax.stop_gradient(jnp.clip(x, 0, 1)))


def inside(x: Any) -> Any:
    """Held to ±1, its gradient 0 on both."""
    return jnp.where((x > -1) & (x < 1), x, jax.lax.stop_gradient(jnp.clip(x, -1, 1)))


def first_largest(x: Any) -> Any:
    """Twice the largest of each row, its gradient that of the first."""
    return 2 * jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1)


def lower_median(x: Any) -> Any:
    """The lower of the two in the middle of each row of six."""
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
