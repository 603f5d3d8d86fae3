"""On a GPU, scans allocate their stacked outputs without a fill, and compute the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.passes import unfilled_stacks
from jaxtrain.program import equations

X, WS = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jax.random.normal(jax.random.key(0), (4, 3, 3))
KEYS = jax.random.split(jax.random.key(1), 4)


def layers(x, ws):
    def layer(x, w_and_key):
        w, key = w_and_key
        kept = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x @ w), x)
        return kept, (kept.sum(), jax.random.fold_in(key, 7))

    @jax.jit
    def forward(x, ws):
        x, (sums, keys) = jax.lax.scan(layer, x, (ws, KEYS), unroll=2)
        return x, sums, jax.random.key_data(keys)

    x, sums, keys = forward(x, ws)
    backwards = jax.lax.scan(lambda carry, w: (carry + w.sum(), carry), 0.0, ws, reverse=True)[1]
    return (x**2).sum() + (sums * backwards).sum(), (sums, backwards, keys)


def gradient(x, ws):
    return jax.value_and_grad(layers, argnums=(0, 1), has_aux=True)(x, ws)


def test_outputs_and_gradients_are_the_same_to_the_bit():
    rewritten = unfilled_stacks(gradient, "gpu")
    jax.tree.map(np.testing.assert_array_equal, jax.jit(gradient)(X, WS), jax.jit(rewritten)(X, WS))


def scans(traced):
    """Yield the scans of a jaxpr."""
    for eqn in traced.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in equations.inner_jaxprs(eqn):
            yield from scans(inner)


def test_every_stack_is_allocated_and_none_is_filled():
    def stacks(fn):
        """The stacked outputs of scans, and the arrays that are allocated without a fill."""
        traced = jax.make_jaxpr(fn)(X, WS)
        outputs = sum(len(eqn.outvars) - equations.scan_sizes(eqn)[1] for eqn in scans(traced.jaxpr))
        return outputs, str(traced).count(" = unfilled[")

    stacked, none = stacks(gradient)
    assert none == 0
    assert stacks(unfilled_stacks(gradient, "gpu")) == (0, stacked)
    assert stacks(unfilled_stacks(gradient, "cpu")) == (stacked, 0)
