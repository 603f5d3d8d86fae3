"""Quantization to 8 bits: formats, scales and operands, beside torchao's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.passes import Fp8
from jaxtrain.passes.fp8.operands import along_features, along_rows, kernel_along
from jaxtrain.passes.fp8.scales import E4M3, E5M2, quantize, scale_of, scaled
from tests.passes import torchao_references as torchao


def values(shape, dtype, seed=0):
    """Return numbers of magnitudes 2⁻²⁰ to 2²⁰, with zeros, and rows of zeros, of tiny and of huge numbers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, shape)
    x[rng.random(shape) < 0.1] = 0
    x[0], x[1], x[2] = 0, 1e-30, 3e38
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_and_numbers_equal_torchao(power_of_two):
    kinds = [(dtype, axis) for dtype in (E4M3, E5M2) for axis in (None, 0, -1)]

    @jax.jit
    def ours(x):
        axes = {None: (0, 1), 0: (0,), -1: (1,)}
        return [quantize(x, dtype, axes[axis], power_of_two=power_of_two) for dtype, axis in kinds]

    wide = values((7, 37), np.float32)
    cases = {
        "wide": wide,
        "bfloat16": values((7, 37), jnp.bfloat16, 1),
        "zeros": jnp.zeros((7, 37)),
        "inf": wide.at[3, 5].set(jnp.inf),
        "nan": wide.at[3, 5].set(jnp.nan),
        "moderate": wide[3:6] * 1e-3,
    }
    for name, x in cases.items():
        for (dtype, axis), found in zip(kinds, ours(x), strict=True):
            data, scale = torchao.quantized(x, dtype.name, axis, power_of_two)
            np.testing.assert_array_equal(found.scale.reshape(scale.shape), scale, err_msg=f"{name} {dtype} {axis}")
            is_nan = np.isnan(np.asarray(found.data, np.float32))
            np.testing.assert_array_equal(torchao.bits(found.data)[~is_nan], data[~is_nan], err_msg=name)
            np.testing.assert_array_equal(is_nan, np.isnan(np.asarray(data.view(dtype), np.float32)))
            # An inf or NaN is never saturated away.
            assert is_nan.any() == (name in ("inf", "nan"))


def test_a_power_of_two_is_the_largest_that_is_not_above_the_scale():
    amax = jnp.asarray([448.0, np.nextafter(np.float32(448), np.float32(999)), 57344.0, 1e-30, 3e38], np.float32)
    scale, power = scale_of(amax, E4M3), scale_of(amax, E4M3, power_of_two=True)
    mantissa, _ = np.frexp(np.asarray(power))
    assert (mantissa == 0.5).all()
    assert (power <= scale).all()
    assert (2 * power > scale).all()


def test_tiles_and_blocks_equal_torchao():
    reference = torchao.blockwise()
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(256, 384)) * 2.0 ** rng.integers(-8, 8, (256, 384)), np.float32)
    x = x.at[:, :128].set(0)
    fp8 = Fp8("block")
    rows, features, columns, across = jax.jit(
        lambda x: (
            along_rows(fp8, x, E4M3, None),
            along_features(fp8, x, E4M3),
            *(kernel_along(fp8, x, i) for i in (0, 1)),
        )
    )(x)
    tensor = torchao.to_torch(x)

    data, inverse = reference["torch_blockwise_scale_act_quant_lhs"](tensor)
    np.testing.assert_array_equal(torchao.bits(features.data).transpose(1, 0, 2).reshape(256, 384), torchao.bits(data))
    np.testing.assert_array_equal(1 / features.scale[..., 0].T, inverse.numpy())

    data, inverse = reference["torch_blockwise_scale_act_quant_rhs"](tensor)
    np.testing.assert_array_equal(torchao.bits(rows.data).reshape(256, 384), torchao.bits(data))
    np.testing.assert_array_equal(1 / rows.scale[:, 0], inverse.numpy())

    data, inverse = reference["torch_blockwise_scale_weight_quant"](tensor)
    np.testing.assert_array_equal(torchao.bits(columns.data).reshape(256, 384), torchao.bits(data))
    np.testing.assert_array_equal(1 / columns.scale[:, 0, ::128], inverse.numpy())
    np.testing.assert_array_equal(torchao.bits(across.data).transpose(1, 0, 2).reshape(256, 384), torchao.bits(data))
    np.testing.assert_array_equal(1 / across.scale[:, ::128, 0].T, inverse.numpy())


def test_arrays_that_are_mapped_are_converted_each_by_its_scale():
    x, scale = values((4, 3, 5), np.float32), jnp.asarray([[[3.0]], [[50.0]], [[7.0]]])
    each = [scaled(x[:, i], E4M3, scale[i]).data for i in range(3)]
    mapped = jax.vmap(lambda x, scale: scaled(x, E4M3, scale).data, (1, 0))(x, scale)
    np.testing.assert_array_equal(torchao.bits(mapped), torchao.bits(jnp.stack(each)))
    one = jax.vmap(lambda scale: scaled(x[:, 1], E4M3, scale).data)(scale)
    np.testing.assert_array_equal(torchao.bits(one[1]), torchao.bits(each[1]))
    assert (torchao.bits(one[0]) != torchao.bits(one[1])).any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.name)
def test_numbers_beside_the_middle_of_two_are_rounded_to_the_nearer(dtype):
    """Rounded twice, as by way of float16, those nearer to the middle than float16 resolves are on the wrong side."""
    middles = np.arange(1, 2, 1 / 16) * 2.0 ** np.arange(-18, 16)[:, None]
    beside = middles[..., None, None] * (1 + np.array([-1, 0, 1]) * 2.0 ** -np.arange(7, 24)[:, None])
    x = np.concatenate([beside.ravel(), -beside.ravel()]).astype(np.float32)
    found = jax.jit(lambda x: scaled(x, dtype, jnp.ones(1)).data)(x)
    largest = float(jnp.finfo(dtype).max)
    expected = torchao.to_torch(jnp.asarray(x)).clamp(-largest, largest).to(torchao.FORMATS[dtype.name])
    np.testing.assert_array_equal(torchao.bits(found), torchao.bits(expected))
