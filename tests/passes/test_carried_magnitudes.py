"""Largest magnitudes of what a scan carries, found where it is computed."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.passes import fuse_casts
from jaxtrain.passes.fp8.scales import E5M2, dequantize, quantize


def _layers(x, factors):
    def layer(carry, factor):
        x, n = carry
        rows = quantize(x.astype(jnp.bfloat16).reshape(8, 4), E5M2, (0, 1))
        columns = quantize(rows.data.astype(np.float32), E5M2, (0, 1))
        out = jnp.sin(dequantize(columns)).reshape(2, 4, 4) * factor + x
        return (out, n + 1), rows.scale

    return jax.lax.scan(layer, (x, 0), factors, reverse=True)


def _carried(fn, *args):
    (scan,) = (eqn for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns if eqn.primitive.name == "scan")
    return [v.aval for v in scan.outvars if v.aval.shape == ()]


def test_a_magnitude_is_carried_with_the_same_bits():
    x, factors = jax.random.normal(jax.random.key(0), (2, 4, 4)), jnp.array([3.0, 20.0, 50.0])
    expected, found = (jax.jit(fn)(x, factors) for fn in (_layers, fuse_casts(_layers, "gpu")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(set(expected[1].ravel().tolist())) == 3
    # Beside the counter, the magnitude of the carried array; that of another array of the body is not carried.
    assert [aval.dtype for aval in _carried(fuse_casts(_layers, "gpu"), x, factors)] == [np.int32, jnp.bfloat16]
    assert len(_carried(fuse_casts(_layers, "cpu"), x, factors)) == 1


def test_an_inf_that_is_carried_stays_visible():
    x, factors = jnp.ones((2, 4, 4)), jnp.array([1.0, jnp.inf, 1.0])
    expected, found = (jax.jit(fn)(x, factors) for fn in (_layers, fuse_casts(_layers, "gpu")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.isfinite(found[0][0]).all()
