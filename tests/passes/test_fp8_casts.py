"""Arrays computed twice, for their scales and for their conversion to 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import Policy, block, kernel
from jaxtrain.passes import Fp8, fuse_casts, save_costly, unroll
from jaxtrain.passes.fp8.scales import CAST
from jaxtrain.passes.xla_gpu.added_products import AddedProducts
from jaxtrain.program.equations import inner_jaxprs

WIDTH = 32


def _layers(params, x):
    def layer(x, kernels):
        def apply(kernels, x):
            up, down = kernels
            normal = kernel(lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)))(x)
            return x + kernel(jax.nn.silu)(normal @ up) @ down

        return block(apply)(kernels, x), None

    return jax.lax.scan(layer, x, params)[0].astype(np.float32).sum()


def _count(traced, name):
    return sum((eqn.primitive.name == name) + sum(_count(j, name) for j in inner_jaxprs(eqn)) for eqn in traced.eqns)


@pytest.mark.parametrize("is_unrolled", [False, True], ids=["scanned", "unrolled"])
def test_the_second_computation_has_the_same_bits(is_unrolled):
    policy = Policy(np.float32, jnp.bfloat16, fp8=Fp8())
    loss = policy.apply(unroll(_layers) if is_unrolled else _layers)
    keys = jax.random.split(jax.random.key(0), 3)
    params = tuple(jax.random.normal(key, (2, WIDTH, WIDTH)) / 5 for key in keys[:2])
    x = jax.random.normal(keys[2], (16, WIDTH))
    differentiate = jax.value_and_grad(loss, argnums=(0, 1))
    fused = fuse_casts(differentiate, "gpu")
    expected, found = (jax.jit(fn)(params, x) for fn in (differentiate, fused))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # Forwards the norm and silu again; backwards the gradient by silu's input, and what is computed from residuals.
    once, twice = (_count(jax.make_jaxpr(fn)(params, x).jaxpr, "logistic") for fn in (differentiate, fused))
    assert twice == 2 * once
    assert str(jax.make_jaxpr(fuse_casts(differentiate, "cpu"))(params, x)) == str(
        jax.make_jaxpr(differentiate)(params, x)
    )


def test_products_of_one_array_convert_it_once_in_each_pass(monkeypatch):
    # Their gradients by the array are rounded otherwise where they are added (test_added_products.py).
    monkeypatch.setattr(AddedProducts, "added", lambda *_: None)

    def layers(params, x):
        def layer(x, kernels):
            def apply(kernels, x):
                gate, up = kernels
                normal = kernel(lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)))(x)
                return x + jnp.tanh(normal @ gate) * (normal @ up)

            return block(apply)(kernels, x), None

        return jax.lax.scan(layer, x, params)[0].astype(np.float32).sum()

    loss = save_costly(Policy(np.float32, jnp.bfloat16, fp8=Fp8()).apply(layers), "gpu")
    differentiate = jax.value_and_grad(loss, argnums=(0, 1))
    fused = fuse_casts(differentiate, "gpu")
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (
        tuple(jax.random.normal(key, (2, WIDTH, WIDTH)) / 5 for key in keys[:2]),
        jax.random.normal(keys[2], (16, WIDTH)),
    )
    expected, found = (jax.jit(fn)(*arguments) for fn in (differentiate, fused))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    rows = [_conversions(jax.make_jaxpr(fn)(*arguments).jaxpr, (16, WIDTH)) for fn in (differentiate, fused)]
    # The array in each pass, and the gradients of both products.
    assert rows == [4 + 2, 2 + 2]


def test_an_array_of_all_layers_is_converted_by_the_scale_of_each():
    """The keys of cross-attention: differentiation of the scan knows the array before the loop, but not the scale."""

    def layers(params, x, memory):
        def layer(x, kernels):
            def apply(kernels, x):
                query, key = kernels
                return x + jnp.tanh(x @ query) * (memory @ key)

            return block(apply)(kernels, x), None

        return jax.lax.scan(layer, x, params)[0].astype(np.float32).sum()

    keys = jax.random.split(jax.random.key(0), 4)
    params = tuple(jax.random.normal(key, (3, WIDTH, WIDTH)) / 5 for key in keys[:2])
    rows = tuple(jax.random.normal(key, (16, WIDTH)) for key in keys[2:])
    scales = tuple(jnp.exp2(jnp.arange(9.0).reshape(3, 3)) for _ in params)
    policy = Policy(np.float32, jnp.bfloat16, fp8=Fp8("delayed"))

    def loss(params, probes, *rows):
        compute = policy.apply(layers, scales=scales, probes=probes)
        return save_costly(compute, "gpu")(params, *rows)

    differentiate = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    arguments = params, jax.tree.map(jnp.zeros_like, scales), *rows
    expected, found = (jax.jit(fn)(*arguments) for fn in (differentiate, fuse_casts(differentiate, "gpu")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def _conversions(traced, shape):
    return sum(
        (eqn.primitive.name == CAST and [v.aval.shape for v in eqn.outvars] == [shape])
        + sum(_conversions(j, shape) for j in inner_jaxprs(eqn))
        for eqn in traced.eqns
    )
