"""Scales of blocks change no gradient, and the block in which an overflow originates is found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erfinv

import jaxtrain as jt
from jaxtrain import block
from jaxtrain.labs.loss_scales import BlockValues, scale_blocks
from jaxtrain.labs.loss_scales.per_layer_scale import target_rms
from jaxtrain.passes import remat, unroll
from jaxtrain.program import rewrite

WIDTH, BLOCKS = 4, 9


def _params(dtype):
    rng = np.random.default_rng(0)
    shapes = {"embed": (5, WIDTH), "encoder": (2, WIDTH, WIDTH), "kv": (WIDTH, WIDTH), "decoder": (3, WIDTH, WIDTH)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def _model(params, tokens):
    """Compute 2 + 1 + 2·3 blocks: scanned and plain, with a shared input, shared and tied parameters, skips around
    blocks and uses of a block's result outside of blocks."""
    layer = block(lambda w, x: jnp.tanh(x @ w) + x)
    attend = block(lambda w, kv, x, source: jnp.sin(x @ w) + source @ kv)
    x = params["embed"][tokens]
    source, states = jax.lax.scan(lambda x, w: (layer(w, x), x), x, params["encoder"])
    y = layer(params["kv"], x)
    y = jnp.cos(y) + y * source.mean()

    def decode(carry, w):
        y, total = carry
        once = layer(w, y)
        twice = attend(w, params["kv"], once, source) + once + y
        return (twice, total + once.sum()), once

    (y, total), steps = jax.lax.scan(decode, (y, jnp.zeros([], y.dtype)), params["decoder"])
    logits = (y + states[1]) @ params["embed"].T
    return (logits**2).mean() + total**2 + (steps**2).mean()


def _zeros(n=BLOCKS):
    return BlockValues(*(jnp.zeros(n, np.float32) for _ in range(2)))


@functools.cache
def _gradients(before, after, dtype):
    """Return a jitted function from the scales to the gradients and what is observed; None for no scaling."""
    tokens = np.array([[0, 3, 1], [4, 1, 2]])
    params = _params(dtype)

    def gradients(scales):
        def loss(params, probes):
            model = before(_model)
            if scales is not None:
                model = scale_blocks(model, probes._replace(scale=scales), probes, frozen=lambda path: False)
            return after(model)(params, tokens)

        return jax.grad(loss, (0, 1))(params, _zeros())

    return jax.jit(gradients)


def _operation_by_operation(eqn, args, run):
    if eqn.primitive.name == "scan":
        return rewrite.unroll_scan(eqn, args, run)
    return run(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, args) if eqn.primitive.name == "jit" else None


def test_gradients_are_those_of_the_unscaled_program():
    """Without a compiler, which fuses two programs differently, and rounds differently in them."""
    scales = np.ldexp(np.float32(1), np.random.default_rng(2).permutation(BLOCKS))
    expected, actual = (
        rewrite.transform(lambda: _gradients(_unchanged, _unchanged, np.float32)(x)[0], _operation_by_operation)()  # noqa: B023
        for x in (None, scales)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def _unchanged(fn):
    return fn


def _low_precision(fn):
    return jt.autocast(fn, jnp.float16)


@pytest.mark.parametrize(
    ("before", "after", "dtype", "spread"),
    [
        (_unchanged, _unchanged, np.float32, 30),
        (_unchanged, _unchanged, np.float64, 60),
        (_unchanged, unroll, np.float32, 30),
        (_unchanged, functools.partial(remat, policy="full"), np.float32, 30),
        # Within float16, whose gradients here are between 2⁻⁷ and 2⁵.
        (_low_precision, _unchanged, np.float32, 3),
    ],
    ids=["scan", "float64", "unrolled", "remat", "float16"],
)
def test_scales_of_blocks_change_no_bit_of_a_gradient(before, after, dtype, spread):
    with jax.enable_x64(dtype == np.float64):
        gradients = _gradients(before, after, dtype)
        expected, _ = gradients(np.ones(BLOCKS, np.float32))
        rng = np.random.default_rng(1)
        for exponents in rng.integers(-spread, spread, (6, BLOCKS)):
            actual, observed = gradients(np.ldexp(np.float32(1), exponents))
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
            assert not observed.overflow.any()


@pytest.mark.parametrize("bad", range(4))
def test_the_block_in_which_an_overflow_originates_is_found(bad):
    """A chain of four float16 blocks: the gradient in one is multiplied by 2¹², which its scale does not allow."""
    gains = np.ones(4, np.float32)
    gains[bad] = 2.0**12
    scales = np.full(4, 2.0**2, np.float32)
    scales[bad] = 2.0**8

    layer = block(lambda w, x: x * w.astype(x.dtype))

    def loss(params):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), params["x"], params["gains"])
        return x.astype(np.float32)

    def observed(gains):
        def scaled(params, probes):
            return scale_blocks(loss, probes._replace(scale=scales), probes, frozen=lambda path: False)(params)

        return jax.grad(scaled, (0, 1))({"x": np.float16(2.0**-12), "gains": gains}, _zeros(4))

    _, clean = observed(np.ones(4, np.float32))
    gradient, found = observed(gains)
    assert not clean.overflow.any()
    assert not all(np.isfinite(x).all() for x in gradient.values())
    np.testing.assert_array_equal(found.overflow > 0, np.arange(4) == bad)


@pytest.mark.parametrize("underflow", [1e-6, 1e-3])
def test_a_scale_is_chosen_from_the_gradients_that_enter_the_block(underflow):
    """Zhao et al. 2019, for gradients beyond float16's range on both sides, with an outlier, for zeros, and for two of
    one block that are so far apart that the larger allows no scale at which the smaller keeps its share."""
    exponents = {"near": [-70, -20, 17, 0, -13], "far": [-70, 10, 17, -20, -13]}
    rng = np.random.default_rng(0)
    entering = {name: np.ldexp(rng.standard_normal((5, 999)), np.array(x)[:, None]) for name, x in exponents.items()}
    entering["near"][3], entering["near"][4, 0] = 0, 2.0**9
    entering = {name: x.astype(np.float32) for name, x in entering.items()}
    backoff = np.array([1, 0.5, 1, 1, 1], np.float32)
    layer = block(lambda w, x: (x + 3 * w["near"].astype(np.float16), 3 * w["far"].astype(np.float16)))

    def loss(w):
        def step(total, of_step):
            w, entering = of_step
            near, far = (x.astype(np.float32) for x in layer(w, np.zeros(999, np.float16)))
            return total + (near * entering["near"]).sum() + (far * entering["far"]).sum(), None

        return jax.lax.scan(step, jnp.float32(0), (w, entering))[0]

    def scaled(w, probes):
        scales = BlockValues(backoff, jnp.zeros(5), jnp.full(5, target_rms(underflow), np.float32))
        return scale_blocks(loss, scales, probes, frozen=lambda path: False)(w)

    probes = BlockValues(*(jnp.zeros(5, np.float32) for _ in range(3)))
    gradients, found = jax.grad(scaled, (0, 1))(jax.tree.map(np.ones_like, entering), probes)
    assert not found.overflow.any()
    for i in range(5):
        of_block = [x[i].astype(np.float64) for x in entering.values() if x[i].any()]
        smallest = max(2.0**-24 / (np.sqrt(2) * erfinv(underflow) * np.sqrt(np.square(g).mean())) for g in of_block)
        highest = min(65504 / 16 / np.abs(g).max() for g in of_block)
        expected = min(2.0 ** np.ceil(np.log2(smallest)), 2.0 ** np.floor(np.log2(highest)))
        assert found.scale[i] == backoff[i] * expected
        for name, x in entering.items():
            # Rounded in float16 at this scale, twice.
            inside = (3 * (x[i].astype(np.float64) * float(found.scale[i])).astype(np.float16)).astype(np.float64)
            rounded = (inside / float(found.scale[i])).astype(np.float32)
            np.testing.assert_array_equal(gradients[name][i], rounded)
