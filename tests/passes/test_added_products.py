"""Sums of products in 8 bits, added where a library computes the products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import Policy
from jaxtrain.passes import Fp8, fuse_casts
from jaxtrain.passes.fp8.scaled_product import NAME, scaled_product
from jaxtrain.passes.fp8.scales import E4M3, E5M2, quantize
from jaxtrain.program.equations import inner_jaxprs

NUMBERS = (((1,), (1,)), ((), ()))
ROWS, WIDTH = 16, 32


def _operands(n):
    keys = jax.random.split(jax.random.key(0), 2 * n)
    rows = [quantize(jax.random.normal(key, (ROWS, WIDTH)), E5M2, (0, 1)) for key in keys[:n]]
    return rows, [quantize(jax.random.normal(key, (WIDTH, WIDTH)), E4M3, (0, 1)) for key in keys[n:]]


def _products(rows, kernels):
    return [scaled_product(*pair, NUMBERS, jnp.bfloat16) for pair in zip(rows, kernels, strict=True)]


def _sum(rows, kernels):
    first, second, third = (x.reshape(4, 4, WIDTH).astype(np.float32) for x in _products(rows, kernels))
    return first + second + third


def _added(fn, *args):
    """Return how many products have another array added."""

    def count(traced):
        of_inner = sum(count(inner) for eqn in traced.eqns for inner in inner_jaxprs(eqn))
        return of_inner + sum(eqn.primitive.name == NAME and len(eqn.invars) == 5 for eqn in traced.eqns)

    return count(jax.make_jaxpr(fn)(*args).jaxpr)


def test_a_sum_is_added_to_the_float32_sums_of_the_last_product_and_rounded_once():
    rows, kernels = _operands(3)
    found = jax.jit(fuse_casts(_sum, "gpu"))(rows, kernels)
    assert found.dtype == np.float32
    assert _added(fuse_casts(_sum, "gpu"), rows, kernels) == 2
    assert _added(fuse_casts(_sum, "cpu"), rows, kernels) == 0

    def wide(i):
        numbers, of_kernel = (np.asarray(x.data, np.float64) / np.float64(x.scale) for x in (rows[i], kernels[i]))
        return numbers @ of_kernel.T

    total = jnp.asarray(wide(0), jnp.bfloat16)
    for i in (1, 2):
        total = jnp.asarray(np.asarray(wide(i) + np.asarray(total, np.float64), np.float32), jnp.bfloat16)
    # But where a float32 sum is next to a tie.
    difference = np.asarray(found.reshape(ROWS, WIDTH), np.float64) - np.asarray(total, np.float64)
    assert (difference != 0).mean() < 0.01
    # A sum's rounding errors are of the size of those of products that are rounded one by one.
    truth = wide(0) + wide(1) + wide(2)
    errors = [
        np.abs(np.asarray(x, np.float64).reshape(ROWS, WIDTH) - truth).mean() for x in (found, _sum(rows, kernels))
    ]
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("where", ["result", "sum"])
def test_a_product_that_is_read_elsewhere_is_not_added(where):
    rows, kernels = _operands(2)

    def fn(rows, kernels):
        first, second = _products(rows, kernels)
        total = first.astype(np.float32) + second.astype(np.float32)
        return total, (first, second) if where == "result" else first.sum() + second.sum()

    expected, found = (jax.jit(f)(rows, kernels) for f in (fn, fuse_casts(fn, "gpu")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert _added(fuse_casts(fn, "gpu"), rows, kernels) == 0


def test_gradients_by_shared_rows_are_added():
    def loss(kernels, x):
        x = x * 2  # in float32: the gradient by each product is converted before they are added
        return sum((jnp.sin(x @ kernel).astype(np.float32)).sum() for kernel in kernels)

    gradients = jax.grad(Policy(np.float32, jnp.bfloat16, fp8=Fp8()).apply(loss), argnums=(0, 1))
    keys = jax.random.split(jax.random.key(0), 4)
    kernels = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[:3]]
    x = jax.random.normal(keys[3], (ROWS, WIDTH))
    expected, found = (jax.jit(fn)(kernels, x) for fn in (gradients, fuse_casts(gradients, "gpu")))
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    assert np.abs(found[1] - expected[1]).max() < 2.0**-7 * np.abs(expected[1]).max()
    assert _added(fuse_casts(gradients, "gpu"), kernels, x) == 2
