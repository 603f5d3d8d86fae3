"""An update of weights with short rows is compiled to loops over vectors, and has the same values."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.cpu.short_rows import as_vectors

SHAPE = (32, 64, 3, 3)


def loss_fn(params, batch, rng):
    return jt.Loss.of((params["weight"] * batch) ** 2), {}


def adam(params, moments, grads):
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in grads.values()))
    grads = {name: jnp.where(norm > 1, g / norm, g) for name, g in grads.items()}
    moments = {name: 0.9 * moments[name] + 0.1 * jnp.square(g) for name, g in grads.items()}
    return {name: x - grads[name] / (jnp.sqrt(moments[name]) + 1e-8) for name, x in params.items()}, moments


def test_values_are_those_of_the_function():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params, moments, grads = ({"weight": jnp.array(rng.random(SHAPE)), "bias": jnp.ones(3)} for _ in range(3))
        args, zero = (params, moments, grads), jnp.zeros([], int)
        found = jax.jit(as_vectors(adam, zero))(*args)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(adam(*args)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)
        assert "while" in str(jax.make_jaxpr(as_vectors(adam, zero, "cpu"))(*args))
        assert str(jax.make_jaxpr(as_vectors(adam, zero, "gpu"))(*args)) == str(jax.make_jaxpr(adam)(*args))


def test_updates_of_short_rows_are_those_of_the_optimizer():
    step = jt.train_step(loss_fn, optax.sgd(0.25 * math.prod(SHAPE)))
    state, batch = step.init({"weight": jnp.ones(SHAPE)}), jnp.ones(SHAPE)
    for _ in range(3):  # each halves the weight
        state, _ = step(state, batch)
    np.testing.assert_array_equal(state.params["weight"], 0.125)


def test_no_loop_of_the_step_is_over_short_rows_and_no_array_is_copied():
    params = {"weight": jnp.ones(SHAPE)}
    step = jt.train_step(loss_fn, optax.adamw(1e-2), clip_norm=1.0)
    hlo = step.jitted.lower(step.init(params), jnp.ones(SHAPE)).compile().as_text()
    entry = hlo[hlo.index("\nENTRY") :]
    results = re.findall(r"= \w+\[([\d,]+)\]\S* (fusion|copy)\(", entry)
    large = [(shape, kind) for shape, kind in results if math.prod(map(int, shape.split(","))) == math.prod(SHAPE)]
    rows = ",".join(map(str, SHAPE))
    # The gradient, the moments and the weight; and the loss, which is not rewritten, with a loop for its squares.
    expected = {("18432", "fusion"): 4, (rows, "fusion"): 1}
    if jax.__version_info__ < (0, 10, 2):  # copies the weight, because the loss reads it too
        expected |= {(rows, "copy"): 1, ("18432", "copy"): 1}
    assert Counter(large) == expected
