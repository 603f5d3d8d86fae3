"""FLOPs counted from the jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.cost.flops import flops
from jaxtrain.losses import cross_entropy
from jaxtrain.models import CNN, GPT2, GPT2Config, functional
from jaxtrain.models.attention import attention
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.primitives import fused_attention
from jaxtrain.passes import autocast, block, remat


def test_flops_of_a_gpt_match_the_closed_form():
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4)
    apply, params = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))
    batch, length, width, layers = 2, 16, 32, 3
    matrices = layers * 12 * width**2 + 64 * width
    attention = layers * 2 * length * width  # scores and weighted values, per token
    forward = 2 * batch * length * (matrices + attention)
    tokens = jax.ShapeDtypeStruct((batch, length), np.int32)
    assert flops(apply, params, tokens) == forward

    def loss(params, tokens):
        return cross_entropy(apply(params, tokens), tokens).mean()

    assert flops(jax.grad(loss), params, tokens) == 3 * forward
    # The same where attention may be cuDNN's.
    assert flops(jax.grad(autocast(loss, jnp.bfloat16)), params, tokens) == 3 * forward


def test_fused_attention_counts_as_its_formula():
    def formula(q, k, v):
        return attention(q, k, v, causal=True)

    def fused(q, k, v):
        return fused_attention(Options(1.0, causal=True), q, k, v, Operands())

    q, k = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 10, 2, 8))
    for fn in (formula, fused):
        assert flops(fn, q, k, k) == 4 * 2 * 4 * 6 * 10 * 8
        assert flops(jax.grad(lambda *a, fn=fn: fn(*a).sum(), argnums=(0, 1, 2)), q, k, k) == 12 * 2 * 4 * 6 * 10 * 8


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 8}])
@pytest.mark.parametrize("packed", [False, True])
def test_long_attention_counts_all_pairs_wherever_it_is(options, packed):
    q, k = jax.ShapeDtypeStruct((2, 256, 4, 8), np.float32), jax.ShapeDtypeStruct((2, 256, 2, 8), np.float32)
    segments = jax.ShapeDtypeStruct((2, 256), np.int32)

    def summed(q, k, v, segments):
        def attend(q, k, v):
            return attention(q, k, v, segments=(segments, segments) if packed else None, **options)

        def layer(x, _):
            return jax.lax.cond(
                x[0, 0, 0, 0] > 0, lambda: remat(block(attend), "dots", "gpu")(x, k, v), lambda: x
            ), None

        return jax.lax.scan(layer, q, length=3)[0].astype(np.float32).sum()

    pairs = 3 * 2 * 2 * 4 * 256 * 256 * 8
    for fn in (summed, autocast(summed, jnp.bfloat16)):
        assert flops(fn, q, k, k, segments) == 2 * pairs
        # The output is saved: what is computed again in the backward pass has no products.
        assert flops(jax.grad(fn, argnums=(0, 1, 2)), q, k, k, segments) == 6 * pairs


def test_flops_of_a_convolution_match_the_closed_form():
    apply, params = functional(nnx.eval_shape(lambda: CNN((8, 8, 3), 16, 10, rngs=nnx.Rngs(0))))
    images = jax.ShapeDtypeStruct((5, 8, 8, 3), np.float32)
    assert flops(apply, params, images) == 2 * 5 * (6 * 6 * 16 * 3 * 3 * 3 + 6 * 6 * 16 * 10)


def test_a_loop_of_unknown_length_raises_an_error():
    with pytest.raises(ValueError, match="while"):
        flops(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x), jnp.ones((2, 2)))


def test_a_conditional_counts_its_most_expensive_branch():
    def fn(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert flops(fn, jnp.ones((2, 2))) == 2 * 16


def test_a_product_by_groups_of_rows_counts_each_row_once():
    sizes = jnp.array([3, 4, 5], jnp.int32)

    def product(x, weights):
        return jax.lax.ragged_dot(x, weights, sizes).sum()

    shapes = jnp.ones((12, 7)), jnp.ones((3, 7, 5))
    assert flops(product, *shapes) == 2 * 12 * 7 * 5
    assert flops(jax.grad(product, (0, 1)), *shapes) == 3 * 2 * 12 * 7 * 5
