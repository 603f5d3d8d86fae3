"""On a GPU, products are rewritten together with what uses them: with the same numbers, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.passes import overwrite_logits, remat, split_products

ROWS, COLUMNS, BIAS = (
    np.random.default_rng(i).standard_normal(shape).astype(np.float32)
    for i, shape in enumerate(((2, 8, 16), (16, 12), (12,)))
)


def autocast(fn):
    return jt.autocast(fn, jnp.bfloat16)


def count(fn, primitive):
    return str(jax.make_jaxpr(fn)(ROWS, COLUMNS, BIAS)).count(f"= {primitive}")


def linear(rows, columns, bias):
    return (rows.reshape(-1, rows.shape[-1]) @ columns + bias[None]).reshape(*rows.shape[:-1], -1)


def assert_same_gradients(fn, rewrite):
    """Assert the same loss and gradients on either platform, to the bit."""
    # Not jitted: XLA may leave out a rounding between two operations.
    programs = [jax.value_and_grad(rewrite(autocast(fn), p), argnums=(0, 1, 2)) for p in ("cpu", "gpu")]
    jax.tree.map(np.testing.assert_array_equal, *(program(ROWS, COLUMNS, BIAS) for program in programs))


def splits(rows, columns, bias):
    first, second = jnp.split(linear(rows, columns, bias), [4], axis=-1)
    return (first.astype(np.float32).sum(-1) ** 2 * jnp.sin(second.astype(np.float32)).sum(-1)).sum()


def test_parts_of_a_split_product_are_products():
    assert [count(split_products(autocast(splits), p), "biased_product") for p in ("cpu", "gpu")] == [1, 2]
    assert_same_gradients(splits, split_products)


def test_the_policy_dots_saves_the_parts():
    rewritten = split_products(autocast(splits), "gpu")
    gradients = [jax.grad(fn) for fn in (rewritten, remat(rewritten, "dots", "gpu"))]
    # Two products, their repetitions in derivatives that nothing uses, and the gradient.
    assert count(gradients[0], "biased_product") == count(gradients[1], "biased_product")


def test_a_product_with_another_use_is_not_split():
    def used_twice(rows, columns, bias):
        both = linear(rows, columns, bias)
        return sum(part.sum() for part in jnp.split(both, 2, axis=-1)) + both.sum()

    assert count(split_products(autocast(used_twice), "gpu"), "biased_product") == 1


def loss(rows, columns, bias):
    logits = linear(rows, columns, bias)
    return cross_entropy(logits.reshape(16, -1), jnp.arange(16) % 12).sum()


def test_the_gradient_of_logits_updates_them():
    gradients = [jax.grad(overwrite_logits(autocast(loss), p), argnums=(0, 1, 2)) for p in ("cpu", "gpu")]
    assert [count(gradient, "dynamic_update_slice") for gradient in gradients] == [0, 1]
    assert_same_gradients(loss, overwrite_logits)


def test_logits_without_a_bias_and_with_a_multiple_of_8_classes():
    def without_bias(rows, columns, bias):
        wide = jnp.concatenate([columns, columns[:, :4]], 1)
        return (
            loss(rows, wide, jnp.concatenate([bias, bias[:4]]) * 0)
            + cross_entropy(rows.reshape(16, 16) @ wide, jnp.zeros(16, int)).sum()
        )

    assert_same_gradients(without_bias, overwrite_logits)
