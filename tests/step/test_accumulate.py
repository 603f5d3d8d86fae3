"""An accumulation window of k weighted micro-batches equals one big batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import jaxtrain as jt
from jaxtrain.program import equations
from jaxtrain.step import accumulate

ROWS = 12
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 3))
TARGETS = np.random.default_rng(1).normal(size=ROWS)


def masked_loss(params, batch, rng):
    error = jnp.tanh(batch["x"] @ params["w"]) - batch["y"]
    return jt.Loss((batch["mask"] * error**2).sum(), batch["mask"].sum()), {}


@functools.cache
def double_step(k):
    return jt.train_step(masked_loss, optax.sgd(0.5), precision="fp64", accumulate=k)


def after_one_update(k, mask):
    with jax.enable_x64(True):
        step = double_step(k)
        state = step.init({"w": np.array([0.3, -0.2, 0.1])})
        state, metrics = step(state, {"x": INPUTS, "y": TARGETS, "mask": mask.astype(np.float64)})
        return np.asarray(state.params["w"]), {name: float(value) for name, value in metrics.items()}


def check_window(k, mask):
    (window, metrics), (whole, whole_metrics) = after_one_update(k, mask), after_one_update(1, mask)
    np.testing.assert_allclose(window, whole, rtol=1e-14, atol=1e-15)
    for name in ("loss", "weight", "grad_norm"):
        assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("k", [2, 3, 4, 12])
@settings(max_examples=10)
@given(mask=arrays(np.int32, ROWS, elements=st.integers(0, 3)))
def test_a_weighted_window_equals_one_big_batch(k, mask):
    check_window(k, mask)


@pytest.mark.parametrize("masked", [range(4), range(4, 8), range(8, 12), range(8), range(ROWS)])
def test_micro_batches_of_weight_zero_have_no_effect(masked):
    mask = np.ones(ROWS)
    mask[list(masked)] = 0
    check_window(3, mask)


@settings(max_examples=25)
@given(mask=arrays(np.float64, ROWS, elements=st.floats(0.01, 5)))
def test_fractional_weights_keep_float64_precision(mask):
    x, y, w = INPUTS, TARGETS, np.array([0.3, -0.2, 0.1])
    out = np.tanh(x @ w)
    gradient = ((2 * mask * (out - y) * (1 - out**2)) @ x) / mask.sum()
    for k in (1, 3):
        np.testing.assert_allclose(after_one_update(k, mask)[0], w - 0.5 * gradient, rtol=1e-13, atol=1e-14)


add_micro_batch = jax.jit(accumulate.add_micro_batch)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(arrays(np.float32, 3, elements=st.integers(-8, 8).map(float)), st.integers(0, 16)),
        min_size=1,
        max_size=6,
    )
)
def test_a_window_sums_weighted_gradients_and_divides_once(micro_batches):
    k = len(micro_batches)
    window = accumulate.open_window({"w": jnp.zeros(3)})
    for gradient, weight in micro_batches:
        window = add_micro_batch(
            window, {"w": jnp.asarray(gradient)}, jt.Loss(jnp.float32(weight), jnp.float32(weight)), k
        )
    weight = sum(w for _, w in micro_batches)
    # Integers, so that float32 rounds only in the division, which XLA computes with a reciprocal.
    total = sum((g * w * k for g, w in micro_batches), np.zeros(3, np.float32))
    np.testing.assert_array_equal(window.sums.acc_grads["w"], total)
    np.testing.assert_array_max_ulp(
        np.asarray(accumulate.mean_gradient(window)["w"]), total / np.float32(weight or 1), maxulp=1
    )
    assert window.loss == (weight, weight)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", range(3))
def test_a_nonfinite_micro_batch_affects_its_own_window_only(bad, position):
    params = {"w": jnp.zeros(2), "b": jnp.zeros(1)}

    def window_of(inject):
        window = accumulate.open_window(params)
        for i in range(3):
            w = jnp.array([1.0, bad if inject and i == position else 2.0])
            window = add_micro_batch(window, {"w": w, "b": jnp.ones(1)}, jt.Loss(jnp.float32(1), jnp.float32(2)), 3)
        return accumulate.mean_gradient(window)

    clean = window_of(inject=False)
    poisoned = window_of(inject=True)
    assert not np.isfinite(poisoned["w"][1])
    assert np.isfinite(poisoned["b"]).all()
    after = window_of(inject=False)
    np.testing.assert_array_equal(after["w"], clean["w"])
    np.testing.assert_array_equal(clean["w"], [3.0, 6.0])


def test_optax_multisteps_stays_nan_after_an_inf():
    """`optax.MultiSteps` resets its sums by multiplication, and 0 · inf is NaN: `accumulate` creates new sums instead.

    Once optax fixes this, the test fails, and `accumulate` may use one window for the whole run.
    """
    optimizer = optax.MultiSteps(optax.sgd(1.0), 2)
    trace = []
    with jax.numpy_dtype_promotion("standard"):
        params = jnp.zeros(())
        state = optimizer.init(params)
        for gradient in [1, 1, np.inf, 1, 1, 1, 1, 1]:
            updates, state = optimizer.update(jnp.float32(gradient), state, params)
            params = optax.apply_updates(params, updates)
            trace.append(float(params))
    np.testing.assert_array_equal(trace, [0, -1, -1] + [np.nan] * 5)


@pytest.mark.parametrize(("rows", "k"), [(10, 4), (2, 4), (3, 2)])
def test_a_batch_size_not_divisible_by_k_is_refused(rows, k):
    step = jt.train_step(masked_loss, optax.sgd(1.0), accumulate=k)
    batch = {"x": np.ones((rows, 3), np.float32), "y": np.ones(rows, np.float32), "mask": np.ones(rows, np.float32)}
    with pytest.raises(
        jt.UserError, match=rf"^batch_size {rows} is not divisible by accumulate {k}: use a multiple of {k}"
    ):
        step(step.init({"w": np.zeros(3, np.float32)}), batch)


def test_a_scalar_batch_leaf_is_refused():
    with pytest.raises(jt.UserError, match=r"^temperature is a scalar, which cannot be split into 2 micro-batches"):
        accumulate.split_batch({"x": jnp.ones((4, 2)), "temperature": jnp.ones(())}, 2)


def test_splitting_keeps_the_order_of_the_rows():
    split = accumulate.split_batch({"x": np.arange(12).reshape(6, 2), "y": np.arange(6)}, 3)
    np.testing.assert_array_equal(split["y"], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(split["x"], np.arange(12).reshape(3, 2, 2))


@functools.cache
def drawing_step(k):
    def loss_fn(params, batch, rng, drawn):
        bits = jax.random.bits(rng)
        return jt.Loss(params * batch.sum(), len(batch)), {}, jnp.roll(drawn, -1).at[-1].set(bits)

    return jt.train_step(loss_fn, optax.sgd(0.1), accumulate=k)


def draws(ks, seed=0):
    """Return the draw of each of 12 micro-batches, in windows of `ks`."""
    state = drawing_step(ks[0]).init(jnp.ones(()), model_state=jnp.zeros(12, np.uint32), seed=seed)
    for k in ks:
        state, _ = drawing_step(k)(state, np.ones(k, np.float32))
    return np.asarray(state.model_state)


def test_random_draws_differ_by_micro_batch_and_do_not_depend_on_windows():
    one_by_one = draws([1] * 12)
    assert len(set(one_by_one.tolist())) == 12
    np.testing.assert_array_equal(draws([4, 4, 4]), one_by_one)
    np.testing.assert_array_equal(draws([4, 1, 1, 4, 1, 1]), one_by_one)
    assert set(draws([4, 4, 4], seed=1).tolist()).isdisjoint(one_by_one.tolist())


def scanned_equations(traced, scanned=False):
    for eqn in traced.eqns:
        yield eqn.primitive.name, scanned
        for inner in equations.inner_jaxprs(eqn):
            yield from scanned_equations(inner, scanned or eqn.primitive.name == "scan")


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_optimizer_runs_once_per_window(k):
    marked = optax.stateless(lambda updates, params: jax.tree.map(jax.lax.cbrt, updates))
    step = jt.train_step(masked_loss, marked, accumulate=k)
    batch = {"x": jnp.ones((8, 3)), "y": jnp.ones(8), "mask": jnp.ones(8)}
    traced = jax.make_jaxpr(step.pure)(step.init({"w": jnp.zeros(3)}), batch)
    assert [scanned for name, scanned in scanned_equations(traced.jaxpr) if name == "cbrt"] == [False]


def test_accumulators_are_float32_and_float64_for_float64_parameters():
    assert accumulate.open_window({"w": jnp.zeros(3, jnp.bfloat16)}).sums.acc_grads["w"].dtype == np.float32
    with jax.enable_x64(True):
        assert accumulate.open_window({"w": jnp.zeros(3, np.float64)}).sums.acc_grads["w"].dtype == np.float64
