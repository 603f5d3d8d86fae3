"""Low precisions combined with windows, rematerialization and meshes train as accurately as the plain program.

`CELLS` holds every pair of levels of any two factors.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.optim import adamw8bit
from tests.step.test_fp8 import BATCH, PARAMS, RULES, loss_fn

PRECISIONS = "fp8", "fp8_row", "fp8_block", "fp8_delayed", "bf16_params_stochastic", "bf16_params_kahan"
MESHES = "", "data=4", "fsdp=4", "data=2,tensor=2"
WINDOWS, REMATS = (1, 4), ("none", "full", "dots")
OPTIMIZERS = "sgd", "adamw8bit"
LEVELS = PRECISIONS, WINDOWS, REMATS, MESHES, OPTIMIZERS
CELLS = [
    (precision, WINDOWS[(i + j) % 2], REMATS[(i + j) % 3], mesh, OPTIMIZERS[(i + j // 2) % 2])
    for (i, precision), (j, mesh) in itertools.product(enumerate(PRECISIONS), enumerate(MESHES))
]
UPDATES = 3
RATIO = 2.0
"""Largest distance from the float64 truth, in units of that of the plain program of the same precision."""


def pairs(cell):
    return set(itertools.combinations(enumerate(cell), 2))


def test_every_pair_of_levels_is_in_a_cell():
    assert set().union(*map(pairs, CELLS)) == set().union(*map(pairs, itertools.product(*LEVELS)))


@functools.cache
def losses_and_params(precision, k, remat, mesh, optimizer):
    """Return the losses of some updates and the last parameters."""
    optimizer = adamw8bit(1e-2, min_8bit_size=1) if optimizer == "adamw8bit" else optax.sgd(0.02)
    step = jt.train_step(loss_fn, optimizer, precision=precision, accumulate=k, remat=remat)
    step = shard(step, make_mesh(mesh), {**RULES, ".*": jax.sharding.PartitionSpec()}) if mesh else step
    state, losses = step.init(PARAMS), []
    for _ in range(UPDATES):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(state.params)]
    return np.array(losses), np.concatenate(leaves)


@functools.cache
def truth(optimizer):
    with jax.enable_x64(True):
        return losses_and_params("fp64", 1, "none", "", optimizer)


def tier(i):
    """Return the marks of a cell: one runs by default."""
    return [] if i == 13 else [pytest.mark.slow if i % 3 == 1 else pytest.mark.nightly]


CASES = [pytest.param(*cell, marks=tier(i)) for i, cell in enumerate(CELLS)]


@pytest.mark.parametrize(("precision", "k", "remat", "mesh", "optimizer"), CASES)
def test_a_cell_is_as_close_to_the_truth_as_the_plain_program(precision, k, remat, mesh, optimizer):
    ours, plain = (losses_and_params(precision, *of, optimizer) for of in ((k, remat, mesh), (1, "none", "")))
    for x, y, exact in zip(ours, plain, truth(optimizer), strict=True):
        assert 0 < np.linalg.norm(x - exact) <= RATIO * np.linalg.norm(y - exact)
