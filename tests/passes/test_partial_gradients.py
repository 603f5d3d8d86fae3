"""Gradients of parameters as partial sums of groups of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtrain.models.layer_norm import layer_norm
from jaxtrain.passes import Groups, Partial, partial_gradients


@pytest.mark.parametrize("on_gpu", [False, True])
def test_gradients_of_a_norm_are_those_of_each_group(on_gpu, monkeypatch):
    if on_gpu:
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, **_: cuda(*args))
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=(4, 3, 8)), dtype) for dtype in (jnp.bfloat16, np.float32))
    params = [jnp.asarray(rng.normal(size=8), np.float32) for _ in range(2)]

    def compute(params, x, weights):
        return (layer_norm(x, *params, 1e-5).astype(np.float32) * weights).sum()

    @jax.jit
    def by_group(x):
        sums = [jnp.zeros((2, 8)) for _ in params]
        groups = Groups(("data",), (2,))

        def computed(sums, x):
            given = [Partial(x, s, groups) for x, s in zip(params, sums, strict=True)]
            return partial_gradients(compute)(given, x, weights)

        return jax.grad(computed, argnums=(0, 1))(sums, x)

    found, of_x = by_group(x)
    halves = [jax.grad(compute, argnums=(0, 1))(params, x[rows], weights[rows]) for rows in (slice(2), slice(2, 4))]
    expected = [jnp.stack(parts) for parts in zip(*(of_params for of_params, _ in halves), strict=True)]
    if not on_gpu:  # added over all rows at once, and placed in the first group
        found, expected = ([each.sum(0) for each in tree] for tree in (found, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), found, expected)
    np.testing.assert_array_equal(of_x, jnp.concatenate([of_rows for _, of_rows in halves]))
