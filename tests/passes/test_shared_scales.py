"""Products of one array with delayed scales, which convert it once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.passes import Fp8, fuse_casts
from jaxtrain.passes.fp8.fp8_product import fp8_product
from jaxtrain.passes.fp8.kernel_scales import KernelScales
from jaxtrain.passes.fp8.scales import CAST, E4M3, scaled
from jaxtrain.passes.xla_gpu.added_products import AddedProducts
from jaxtrain.program.equations import inner_jaxprs

ROWS, WIDTH = 8, 16


def _loss(x, kernels, probes, scales):
    products = (
        fp8_product(x, kernel, fp8=Fp8("delayed"), result=jnp.bfloat16, scales=KernelScales(*of_kernel))
        for kernel, *of_kernel in zip(kernels, scales, probes, strict=True)
    )
    return sum(jnp.sin(product).astype(np.float32).sum() for product in products)


def _conversions(traced):
    """Return how often rows are converted to the format of activations."""
    return sum(
        (eqn.primitive.name == CAST and [v.aval.str_short() for v in eqn.outvars] == [f"float8_e4m3fn[{ROWS},{WIDTH}]"])
        + sum(map(_conversions, inner_jaxprs(eqn)))
        for eqn in traced.eqns
    )


@pytest.fixture
def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    kernels = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[:3]]
    return jax.random.normal(keys[3], (ROWS, WIDTH), jnp.bfloat16), kernels, jnp.zeros((3, 3))


@pytest.mark.parametrize("are_equal", [True, False], ids=["equal", "edited"])
def test_products_of_one_array_take_the_scale_of_the_first(are_equal, arguments, monkeypatch):
    monkeypatch.setattr(AddedProducts, "added", lambda *_: None)  # which is rounded otherwise
    differentiate = jax.value_and_grad(_loss, argnums=(0, 1, 2))
    fused = fuse_casts(differentiate, "gpu")
    scales = jnp.array([[100.0, 90.0, 1e3], [100.0, 80.0, 2e3], [100.0, 70.0, 3e3]])
    given = scales if are_equal else scales.at[1:, 0].set(jnp.array([3.0, 7.0]))
    expected = jax.jit(differentiate)(*arguments, scales)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(fused)(*arguments, given), expected)
    counts = [_conversions(jax.make_jaxpr(fn)(*arguments, given).jaxpr) for fn in (differentiate, fused)]
    assert counts == [3, 1]
    if not are_equal:
        assert jax.jit(differentiate)(*arguments, given)[0] != expected[0]


def test_numbers_that_are_no_operands_keep_their_scales():
    def converted(x, *scales):
        return [scaled(x, E4M3, scale).data for scale in scales]

    x, scales = jnp.arange(1.0, 9.0).reshape(2, 4), (jnp.full((1, 1), 3.0), jnp.full((1, 1), 50.0))
    expected, found = (jax.jit(fn)(x, *scales) for fn in (converted, fuse_casts(converted, "gpu")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_inf_or_nan_stays_visible_and_zeros_keep_their_sign():
    x = jnp.array([[jnp.inf, -jnp.inf, jnp.nan, 3e38], [-0.0, 0.0, 1.0, -3e38]])
    numbers = scaled(x, E4M3, jnp.full((1, 1), 100.0), hides_inf=False).data.astype(np.float32)
    assert np.isnan(numbers).tolist() == [[True, True, True, False], [False] * 4]
    assert numbers[0, 3] == -numbers[1, 3] == 448
    assert np.signbit(numbers[1]).tolist() == [True, False, False, True]
