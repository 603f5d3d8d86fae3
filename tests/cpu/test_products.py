"""Rewritten convolutions and products have the values and gradients of XLA's own, for all shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxtrain
from jaxtrain.cpu.products import cpu_products, loop_convolutions
from jaxtrain.program.equations import inner_jaxprs

LAYOUTS = {
    1: [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW")],
}


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 2))
    per_axis = lambda values: draw(st.tuples(*[values] * rank))  # noqa: E731
    taps, strides, dilation = (per_axis(st.integers(1, 3)) for _ in range(3))
    padding = per_axis(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    spans = [(k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True)]
    sides = [max(draw(st.integers(1, 5)), n - sum(p)) for n, p in zip(spans, padding, strict=True)]
    rows, into, out = (draw(st.integers(1, 3)) for _ in range(3))
    layout = draw(st.sampled_from(LAYOUTS[rank]))
    dims = lax.conv_dimension_numbers((1,) * (rank + 2), (1,) * (rank + 2), layout)
    x, kernel = np.empty(rank + 2, int), np.empty(rank + 2, int)
    x[list(dims.lhs_spec)] = [rows, into, *sides]
    kernel[list(dims.rhs_spec)] = [out, into, *taps]
    options = {"window_strides": strides, "padding": padding, "rhs_dilation": dilation, "dimension_numbers": layout}
    return tuple(x), tuple(kernel), options


def gradients(fn, *args):
    y, pull = jax.vjp(fn, *args)
    return [y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))]


@settings(max_examples=20, deadline=None)
@given(convolutions())
def test_rewritten_products_agree_to_rounding(convolution):
    x, kernel, options = convolution
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        args = jnp.array(rng.normal(size=x)), jnp.array(rng.normal(size=kernel))

        def convolve(x, kernel):
            return lax.conv_general_dilated(x, kernel, **options)

        rewritten = cpu_products(convolve)
        assert "conv_general_dilated" not in str(jax.make_jaxpr(rewritten)(*args)) or out_size(convolve, args) > 16
        in_loops = loop_convolutions(lambda *args: gradients(convolve, *args))
        assert set(layouts(jax.make_jaxpr(in_loops)(*args))) == {CHANNELS_LAST[len(kernel) - 2]}
        all_three = jax.jit(lambda *args: (gradients(rewritten, *args), in_loops(*args), gradients(convolve, *args)))(
            *args
        )
        for ours, looped, expected in zip(*all_three, strict=True):
            np.testing.assert_allclose(looped, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


CHANNELS_LAST = {
    1: lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1)),
    2: lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
}


def layouts(closed):
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn.params["dimension_numbers"]
        for inner in inner_jaxprs(eqn):
            yield from layouts(jax.extend.core.ClosedJaxpr(inner, ()))


def test_convolutions_in_a_window_have_the_layout_of_the_backend_library():
    def loss_fn(params, batch, rng):
        del rng
        y = lax.conv_general_dilated(batch, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jaxtrain.Loss((y**2).sum(), weight=len(batch)), {}

    found = {}
    for k in (1, 2):
        step = jaxtrain.train_step(loss_fn, optax.sgd(0.1), accumulate=k)
        state = step.init(jnp.ones((3, 3, 2, 2)), seed=0)
        found[k] = set(layouts(jax.make_jaxpr(step.pure)(state, jnp.ones((4, 6, 6, 2)))))
    assert found[2] == {CHANNELS_LAST[2]}
    assert len(found[1]) == 2  # outside of loops XLA chooses the layout


def out_size(fn, args):
    return jax.eval_shape(fn, *args).size


def products(x, kernel, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    fn = cpu_products(lambda x, kernel: lax.conv_general_dilated(x, kernel, **options))
    traced = str(jax.make_jaxpr(fn)(jnp.zeros(x, jnp.bfloat16), jnp.zeros(kernel, jnp.bfloat16)))
    return "conv_general_dilated" not in traced


def test_convolutions_with_at_most_as_many_positions_as_taps_become_products():
    assert products((2, 4, 4, 8), (3, 3, 8, 8))
    assert products((2, 4, 5, 8), (5, 5, 8, 8))  # positions 20, taps 25
    assert not products((2, 5, 5, 8), (3, 3, 8, 8))
    # Grouped and transposed convolutions are left to XLA.
    assert not products((2, 4, 4, 8), (3, 3, 1, 8), feature_group_count=8)
    assert not products((2, 2, 2, 8), (3, 3, 8, 8), lhs_dilation=(2, 2), padding=((1, 1), (1, 1)))


def test_the_smaller_one_of_windows_and_kernel_is_transposed():
    def transposed(features, rows):
        axes = ("NHWC", "OIHW", "NHWC")
        fn = cpu_products(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes))
        closed = jax.make_jaxpr(fn)(jnp.ones((rows, 2, 2, 5)), jnp.ones((features, 5, 3, 3)))
        found = [eqn.params["permutation"] for eqn in closed.eqns if eqn.primitive.name == "transpose"]
        return (0, 2, 3, 1) in found

    assert not transposed(features=8, rows=2)
    assert transposed(features=7, rows=2)


def test_low_precision_results_keep_their_dtype():
    fn = cpu_products(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )
    assert jax.eval_shape(fn, jnp.zeros((1, 2, 2, 3), jnp.bfloat16), jnp.zeros((3, 3, 3, 4), jnp.bfloat16)).dtype == (
        jnp.bfloat16
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_low_precision_products_are_rounded_like_those_of_xla(dtype):
    # The products and sums of these integers are exact in float32, but not all of them in the low dtype.
    rng = np.random.default_rng(0)
    x, w = (jnp.array(rng.integers(-20, 20, shape), dtype) for shape in ((7, 5), (5, 3)))
    rewritten = cpu_products(jnp.dot)
    assert "preferred_element_type=float32" in str(jax.make_jaxpr(rewritten)(x, w))
    for ours, expected in zip(gradients(rewritten, x, w), gradients(jnp.dot, x, w), strict=True):
        assert ours.dtype == expected.dtype == dtype
        np.testing.assert_array_equal(ours, expected)
    overflowing = jnp.full((1, 2), 300.0, np.float16)
    assert np.isinf(rewritten(overflowing, overflowing.T)).all()


def test_other_products_are_unchanged():
    for args in (
        (jnp.ones((2, 3)), jnp.ones((3, 2))),
        (jnp.ones((2, 2, 3), jnp.bfloat16), jnp.ones((2, 3, 2), jnp.bfloat16)),
    ):
        traced = [str(jax.make_jaxpr(fn)(*args)) for fn in (jnp.matmul, cpu_products(jnp.matmul))]
        assert traced[0] == traced[1]
