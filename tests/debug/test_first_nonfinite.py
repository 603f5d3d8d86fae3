"""The origin of the first inf or NaN that reaches a result, through all control flow and in float64."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtrain.debug import first_nonfinite
from jaxtrain.debug.first_nonfinite import NonfiniteTracer


def origin(fn, *args, wide=False):
    """Return the operation and source text of each place, and the value."""
    tracer = NonfiniteTracer(wide=wide)
    closed = jax.make_jaxpr(fn)(*args)
    with jax.enable_x64(wide):
        (out,) = tracer.run(closed, {str(i): jnp.asarray(x) for i, x in enumerate(jax.tree.leaves(args))})
    return [(place.operation, place.line.partition(": ")[2]) for place in tracer.origin(out)], out.value


X = jnp.array([0.0, 1.0, 4.0])


def test_the_backward_pass_is_attributed_to_its_forward_line():
    def loss(x):
        root = jnp.sqrt(x)
        return jnp.sum(root * jnp.array([0.0, 1.0, 1.0]))

    places, _ = origin(jax.grad(loss), X)
    assert places == [("div", "root = jnp.sqrt(x)"), ("mul", "root = jnp.sqrt(x)")]


def test_nonfinite_values_that_reach_no_result_are_ignored():
    def attended(scores):
        masked = jnp.where(jnp.array([True, True, False]), scores, -jnp.inf)  # a mask: exp(-inf) is 0
        weights = jax.nn.softmax(masked)
        unused = jnp.where(weights > 0, jnp.log(weights), 0.0)
        return jnp.sum(unused) + jnp.log(weights[2] * 0.0 - 1.0)  # NaN

    places, _ = origin(attended, X)
    assert places == [("log", "return jnp.sum(unused) + jnp.log(weights[2] * 0.0 - 1.0)  # NaN")]
    assert origin(lambda x: jnp.sum(jax.nn.softmax(x)), X)[0] == []


def test_the_nan_of_a_fully_masked_row_is_located():
    def attended(scores):
        masked = jnp.where(scores > 10.0, scores, -jnp.inf)
        return jnp.sum(jax.nn.softmax(masked))

    (place,) = origin(attended, X)[0]
    assert place == ("sub", "return jnp.sum(jax.nn.softmax(masked))")


def in_scan(x):
    def body(carry, row):
        return carry + jnp.log(row), carry * 2.0

    return lax.scan(body, jnp.zeros(()), x)[0]


def in_while(x):
    def body(state):
        i, y = state
        return i + 1, y * jnp.exp(y)

    return lax.while_loop(lambda state: state[0] < 9, body, (0, x[2]))[1]


def in_cond(x):
    return lax.cond(x[0] > 0.0, lambda x: x[0], lambda x: 1.0 / x[0], x)


def in_jit(x):
    return jax.jit(lambda x: jnp.sum(jnp.log(x)))(x)


def in_remat(x):
    return jax.grad(jax.checkpoint(lambda x: jnp.sum(x**-0.5)))(x)[0]


@jax.custom_vjp
def rooted(x):
    return jnp.sum(x)


rooted.defvjp(lambda x: (jnp.sum(x), x), lambda x, g: (g * lax.rsqrt(x),))


def in_custom_vjp(x):
    return jax.grad(rooted)(x)[0]


@pytest.mark.parametrize(
    ("fn", "operation", "line"),
    [
        (in_scan, "log", "return carry + jnp.log(row), carry * 2.0"),
        (in_while, "exp", "return i + 1, y * jnp.exp(y)"),
        (in_cond, "div", "return lax.cond(x[0] > 0.0, lambda x: x[0], lambda x: 1.0 / x[0], x)"),
        (in_jit, "log", "return jax.jit(lambda x: jnp.sum(jnp.log(x)))(x)"),
        (in_remat, "pow", "return jax.grad(jax.checkpoint(lambda x: jnp.sum(x**-0.5)))(x)[0]"),
        (
            in_custom_vjp,
            "rsqrt",
            "return jax.grad(rooted)(x)[0]",
        ),  # a backward rule has the line of its call
    ],
)
def test_the_origin_is_found_through_control_flow(fn, operation, line):
    places, value = origin(fn, X)
    assert places[0] == (operation, line)
    assert not np.isfinite(value)
    assert np.array_equal(value, fn(X), equal_nan=True)


def test_only_the_used_slice_of_stacked_values_is_traced():
    def layers(x):
        ys = lax.scan(lambda c, row: (c, jnp.log(row)), 0.0, x)[1]  # 1.4, 0, -inf
        return lax.scan(lambda c, y: (c, lax.acos(y)), 0.0, ys)[1][0]

    places, value = origin(layers, X[::-1])
    assert places == [("acos", "return lax.scan(lambda c, y: (c, lax.acos(y)), 0.0, ys)[1][0]")]
    assert np.isnan(value)


def test_a_nonfinite_input_is_reported_as_the_origin():
    tracer = NonfiniteTracer()
    closed = jax.make_jaxpr(lambda x, w: jnp.sum(x * w))(X, X)
    (out,) = tracer.run(closed, {"batch/image": X.at[1].set(jnp.nan), "params/w": X})
    (place,) = tracer.origin(out)
    assert place.operation is None
    assert place.value == "batch/image: float32[3], 1 NaN, else 0 to 4"


LARGE = 4099
"""Number of elements, which the arrays of no other test have."""


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("in_a_scan", [False, True])
def test_values_are_freed_after_their_last_use(monkeypatch, wide, in_a_scan):
    alive = []
    name = "_in_float64" if wide else "bind"
    evaluate = getattr(first_nonfinite, name)

    def counted(eqn, values):
        alive.append(sum(x.size == LARGE for x in jax.live_arrays()))
        return evaluate(eqn, values)

    def chain(x):
        for _ in range(20):
            x = jnp.cos(x) + x
        return x

    def program(x):
        return lax.scan(lambda c, _: (chain(c), None), x, None, length=2)[0].sum() if in_a_scan else chain(x).sum()

    monkeypatch.setattr(first_nonfinite, name, counted)
    gc.collect()
    before = sum(x.size == LARGE for x in jax.live_arrays())
    origin(program, jnp.ones(LARGE), wide=wide)
    assert len(alive) > 40
    assert max(alive) - before <= 6


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_an_overflow_in_low_precision_does_not_occur_in_float64(dtype):
    def fn(x):
        low = (x + 1000.0).astype(dtype)
        return jnp.sum((low**30 / low**29).astype(np.float32))

    places, value = origin(fn, X)
    assert places[0] == ("integer_pow", "return jnp.sum((low**30 / low**29).astype(np.float32))")
    places, value = origin(fn, X, wide=True)
    assert places == []
    np.testing.assert_allclose(value, 3005.0, rtol=1e-13)


def program(params, x, key):
    """Use operations whose parameters name a dtype or contain a program, as training steps do."""
    keep = jax.random.bernoulli(key, 0.5, (4, 4))
    h = jnp.where(keep, x @ params["w"], 0.0).astype(jnp.bfloat16).astype(jnp.float32)
    h = jnp.dot(h, params["w"], preferred_element_type=jnp.float32) + jnp.zeros((4, 4)).at[jnp.array([0, 0, 1])].add(
        h[:3]
    )
    h = lax.scan(lambda c, w: (jnp.tanh(c * w), jnp.cumsum(c)), h, params["w"][:, :, None] * jnp.ones((4, 4, 4)))[0]
    h = jax.nn.gelu(h) + jnp.sort(h) + lax.reduce(h, np.float32(0), lax.add, (0,))[None]
    image = lax.conv_general_dilated(h[None, None], h[None, None], (1, 1), "SAME")
    pooled = lax.reduce_window(image, np.float32(-np.inf), lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return jnp.sum(pooled**2) + jax.nn.logsumexp(h) + jnp.sum(lax.iota(np.float32, 3) / 3.0)


def test_wide_evaluates_the_same_program_in_float64():
    key = jax.random.key(0)
    params, x = {"w": jax.random.normal(jax.random.key(1), (4, 4)) / 2}, jax.random.normal(jax.random.key(2), (4, 4))
    keep = np.asarray(jax.random.bernoulli(key, 0.5, (4, 4)))
    closed, shapes = jax.make_jaxpr(jax.value_and_grad(program), return_shape=True)(params, x, key)
    with jax.enable_x64(True):
        outs = NonfiniteTracer(wide=True).run(closed, {"w": params["w"], "x": x, "key": key})
        loss, grads = jax.tree.unflatten(jax.tree.structure(shapes), [out.value for out in outs])
        assert loss.dtype == grads["w"].dtype == np.float64

        def reference(w):
            h = jnp.where(keep, np.float64(x) @ w, 0.0)
            h = h @ w + jnp.zeros((4, 4)).at[jnp.array([0, 0, 1])].add(h[:3])
            for i in range(4):
                h = jnp.tanh(h * w[i][:, None])
            h = jax.nn.gelu(h) + jnp.sort(h) + h.sum(0)[None]
            image = lax.conv_general_dilated(h[None, None], h[None, None], (1, 1), "SAME")
            pooled = lax.reduce_window(image, -np.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
            return jnp.sum(pooled**2) + jax.nn.logsumexp(h) + 1.0

        expected, gradient = jax.value_and_grad(reference)(jnp.asarray(np.float64(params["w"])))
    # Constants (of gelu, 1/3) are rounded to float32: a relative error of 6e-8.
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], gradient, rtol=1e-5, atol=1e-6)
