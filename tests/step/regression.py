"""A small regression, and a training step for it with a loss scale."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(12, 4)), RANDOM.normal(size=(12, 2))
BATCH32 = {"x": X.astype(np.float32), "y": Y.astype(np.float32)}
INPUTS = {"x": BATCH32["x"]}


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes(), (a, b)


def squared_error(out, batch):
    return jt.Loss(((out - batch["y"]) ** 2).sum(), weight=len(out)), {}


def adam_with_schedule():
    return optax.adamw(optax.linear_schedule(0.1, 0.01, 10))


@functools.cache
def scaled_step():
    def loss_fn(params, batch, rng):
        return squared_error(jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"][None], batch)

    scaler = jt.dynamic_loss_scale(init_scale=1024.0)
    return jt.train_step(loss_fn, adam_with_schedule(), accumulate=3, clip_norm=1.0, loss_scale=scaler)


def batch_with(bad, row):
    batch = copy.deepcopy(BATCH32)
    batch["x"][row, 1] = bad
    return batch


def is_deleted(tree):
    return [x.is_deleted() for x in jax.tree.leaves(tree)]
