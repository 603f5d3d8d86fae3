"""Moments in 8 bits on a mesh: the codes of one device, and no moment is gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard, state_shardings
from jaxtrain.optim import adamw8bit
from jaxtrain.optim.blockwise_quantization import Blockwise

# Blocks of 256 elements: parts of rows, whole rows and pieces of several rows; shards of 96 and 32 columns.
SHAPES = {"wide": (12, 768), "square": (96, 64), "stack": (3, 24, 192)}
RULES = {"wide": P(None, ("fsdp", "tensor")), "square": P("tensor", "fsdp"), "stack": P(None, "fsdp", "tensor")}


def loss_fn(params, batch, rng):
    del rng
    total = sum((p * batch["g"][:, : p.size].reshape(-1, *p.shape).sum(0)).sum() for p in jax.tree.leaves(params))
    return jt.Loss(total, jnp.asarray(float(len(batch["g"])))), {}


def batches():
    rng = np.random.default_rng(0)
    size = max(int(np.prod(shape)) for shape in SHAPES.values())
    for _ in range(4):
        # With 8 digits and equal in 8 rows, so that their sum is exact in any order.
        g = jnp.asarray(rng.standard_normal(size) * 10.0 ** rng.uniform(-4, 0, size), jnp.bfloat16)
        yield {"g": np.repeat(np.asarray(g, np.float32)[None], 8, 0)}


def train(mesh):
    step = jt.train_step(loss_fn, adamw8bit(2**-7, 0.5, 0.5), precision="fp32", ema=0.5)
    if mesh is not None:
        step = shard(step, make_mesh(mesh), RULES)
    state = step.init({k: jnp.ones(shape) for k, shape in SHAPES.items()}, seed=0)
    for batch in batches():
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "data=2,fsdp=2"])
def test_moments_are_those_of_one_device_to_the_bit(mesh):
    alone, state = train(None), train(mesh)
    for a, b in zip(jax.tree.leaves(alone.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, moment in optax.tree.get(state.opt_state, "mu").items():
        assert isinstance(moment, Blockwise)
        assert moment.codes.sharding.is_equivalent_to(state.params[name].sharding, moment.codes.ndim)
        assert moment.absmax.addressable_shards[0].data.size * 2 == moment.absmax.size


def test_an_update_moves_only_maxima_of_short_runs_between_devices():
    mesh, tx = make_mesh("fsdp=2,tensor=2"), adamw8bit()
    params = {k: jnp.ones(shape) for k, shape in SHAPES.items()}
    state = jt.train_step(loss_fn, tx).init(params, seed=0)
    shardings = state_shardings(state, mesh, RULES)
    of_params, of_moments = shardings.params, shardings.opt_state
    update = jax.jit(tx.update, in_shardings=(of_params, of_moments, of_params), out_shardings=(of_params, of_moments))
    text = update.lower(params, state.opt_state, params).compile().as_text()
    moved = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|all-reduce|collective-permute)\(", text)
    assert moved
    runs = max(np.prod(shape) for shape in SHAPES.values()) // 16
    assert max(np.prod([int(n) for n in sizes.split(",") if n]) for sizes in moved) <= runs
