"""On a GPU, a scan over layers saves the results of costly operations only, and its gradients are the same."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.passes import block, fuse_slices, recomputed, save_costly

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


def activated_layers(x, up, down):
    apply = block(lambda x, up, down: x + recomputed(jax.nn.gelu)(x @ up) @ down)
    return jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, (up, down))[0].sum()


def on_a_gpu(fn):
    return fuse_slices(save_costly(fn, "gpu"), "gpu")


def test_fused_slices_save_no_activation_and_change_no_bit():
    low = jt.autocast(activated_layers, jnp.bfloat16)
    _, pullback = jax.vjp(on_a_gpu(low), X, UP, DOWN)
    assert sum(leaf.shape == (5, 4, 7) for leaf in jax.tree.leaves(pullback)) == 1
    # On a CPU, XLA multiplies in float32 and would drop the rounding before a product in one of the two programs.
    gradients = [
        jax.jit(jax.grad(fn, argnums=(0, 1, 2)), compiler_options={"xla_allow_excess_precision": False})(X, UP, DOWN)
        for fn in (save_costly(low, "gpu"), on_a_gpu(low))
    ]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_only_the_derivative_of_an_activation_has_a_barrier():
    text = str(jax.make_jaxpr(jax.grad(on_a_gpu(jt.autocast(activated_layers, jnp.bfloat16))))(X, UP, DOWN))
    # Of a factor, not of the saved array, which would be copied for it.
    assert text.count("= optimization_barrier") == text.count(":bf16[] = optimization_barrier") == 1


def test_an_activation_of_several_values_is_computed_by_one_kernel():
    def gated(x, gate, up, down):
        def swiglu(gate, up):
            return recomputed(jax.nn.silu)(gate) * up

        apply = block(lambda x, gate, up, down: x + recomputed(swiglu)(x @ gate, x @ up) @ down)
        return jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, (gate, up, down))[0].sum()

    low, arrays = jt.autocast(gated, jnp.bfloat16), (X, UP, UP + 1, DOWN)
    differentiated = [jax.grad(fn, argnums=(0, 1, 2, 3)) for fn in (save_costly(low, "gpu"), on_a_gpu(low))]
    jax.tree.map(np.testing.assert_array_equal, *(jax.jit(fn)(*arrays) for fn in differentiated))
    text = str(jax.make_jaxpr(differentiated[1])(*arrays))
    # The checkpoint of silu would have a barrier before the saved gate.
    assert text.count("prevent_cse=True") == 0
    assert text.count("= optimization_barrier") == 1
