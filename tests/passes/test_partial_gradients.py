"""Gradients of parameters as partial sums of groups of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtrain.models.layers.layer_norm import layer_norm
from jaxtrain.passes import Groups, LastPartial, Partial, partial_gradients


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


def test_the_gradient_of_the_last_micro_batch_is_added_to_the_earlier_ones():
    rng = np.random.default_rng(0)
    params = {"layers": rng.normal(size=(3, 5, 5)), "bias": rng.normal(size=5)}
    earlier = {name: rng.normal(size=(2, *p.shape)) for name, p in params.items()}

    def compute(params, x):
        x, _ = lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params["layers"])
        return jnp.square(x + params["bias"][None]).sum()

    @jax.jit
    def sums_of_window(x):
        def computed(totals):
            groups, weight = Groups(("data",), (2,)), jnp.array(0.7)
            given = {
                name: LastPartial(p, *totals[name], earlier[name], weight, groups, None) for name, p in params.items()
            }
            return partial_gradients(compute)(given, x)

        return jax.grad(computed)({name: (jnp.zeros(p.shape), jnp.zeros(2)) for name, p in params.items()})

    with jax.enable_x64(True):
        x = rng.normal(size=(4, 5))
        found = sums_of_window(x)
        for name, gradient in jax.grad(compute)(params, x).items():
            np.testing.assert_allclose(found[name][0], earlier[name].sum(0) + 0.7 * gradient, rtol=1e-12)
            assert not found[name][1].any()
        x[3] = np.inf
        assert (sums_of_window(x)["layers"][1] != 0).tolist() == [False, True]
