"""On a GPU, a scan over layers saves the results of costly operations only, and its gradients are the same."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.transforms import block, recomputed, save_costly

X, KEYS = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), jax.random.split(jax.random.key(0), 5)
UP, DOWN = (jax.random.normal(jax.random.key(i), shape) for i, shape in ((1, (5, 3, 7)), (2, (5, 7, 3))))


@block
def mlp(x, up, down, key):
    hidden = jnp.where(jax.random.bernoulli(key, 0.5, (4, 7)), jax.nn.gelu(x @ up), 0)
    return x + jnp.cumsum(jnp.tanh(hidden @ down), 0)


def layers(x, up, down, keys):
    return jax.lax.scan(lambda x, layer: (mlp(x, *layer), None), x, (up, down, keys))[0].sum()


def saved_shapes(fn):
    _, pullback = jax.vjp(lambda *arrays: fn(*arrays, KEYS), X, UP, DOWN)
    return sorted(x.shape for x in jax.tree.leaves(pullback) if np.ndim(x) and x.dtype != jnp.uint32)


def test_a_scan_on_a_gpu_saves_its_inputs_and_products_and_nothing_cheap():
    inputs = [UP.shape, DOWN.shape, KEYS.shape, (5, 4, 3)]
    # Besides, the products [4, 7] and [4, 3] of the five layers; not gelu, the mask, or tanh.
    assert saved_shapes(save_costly(layers, "gpu")) == sorted([*inputs, (5, 4, 7), (5, 4, 3)])
    assert saved_shapes(save_costly(layers, "cpu")) == saved_shapes(layers)


def test_an_activation_with_a_custom_derivative_is_not_saved():
    def activated(x, up, down, keys):
        apply = block(lambda x, up, down: x + jax.nn.relu(x @ up) @ down)
        return jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, (up, down))[0].sum()

    assert saved_shapes(save_costly(activated, "gpu")).count((5, 4, 7)) == 1


def test_low_precision_products_with_a_bias_are_saved_and_activations_are_not():
    def biased(x, up, down, keys):
        apply = block(lambda x, up, down: x + jnp.tanh(x @ up + up[:1]) @ down)
        return jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, (up, down))[0].sum()

    stacks = saved_shapes(save_costly(jt.autocast(biased, jnp.bfloat16), "gpu"))
    assert stacks.count((5, 4, 7)) == 1


def test_activations_of_low_precision_products_are_computed_again():
    def activated(x, up, down, keys):
        apply = block(lambda x, up, down: x + recomputed(jax.nn.gelu)(x @ up) @ down)
        return jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, (up, down))[0].sum()

    stacks = saved_shapes(save_costly(jt.autocast(activated, jnp.bfloat16), "gpu"))
    assert stacks.count((5, 4, 7)) == 1


def test_gradients_are_the_same_to_the_bit():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, np.float64) for x in (X, UP, DOWN)]
        gradients = [
            jax.jit(jax.grad(fn, argnums=(0, 1, 2)))(*arrays, KEYS) for fn in (layers, save_costly(layers, "gpu"))
        ]
        jax.tree.map(np.testing.assert_array_equal, *gradients)
