"""Only what a policy names is rounded: the batch's own numbers, and what a loss computes from them, stay float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.passes import policy
from jaxtrain.step import averaged

LOW = ["bf16", "bf16_compute", "bf16_params", "bf16_params_kahan", "bf16_params_stochastic", "fp16"]
ROWS = 1001  # which bfloat16 does not have, nor float16 its sums


def random_batch(seed, rows=ROWS):
    generator = np.random.default_rng(seed)
    return {
        "x": generator.integers(-2, 3, (rows, 4)).astype(np.float32),
        "y": generator.standard_normal(rows).astype(np.float32),
        "weight": generator.random(rows).astype(np.float32),
        "mask": generator.random(rows) < 0.9,
        "label": generator.integers(0, 5, rows).astype(np.int32),
    }


@jax.jit
def scaled_sum(x):
    return (x * 0.3).sum()


def over_chunks(x):
    def add(carry, chunk):
        return (carry[0] + chunk.sum(), carry[1] + 1.0), chunk * 0.7

    (total, count), chunks = jax.lax.scan(add, (0.0, 0.0), x.reshape(7, -1))
    return total / count + chunks.sum()


def counted_down(x):
    return jax.lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] + x.sum() * 0.1, c[1] - 1), (x.mean(), 3))[0]


# From the batch and an output of the model to a number that depends on the batch alone.
OF_BATCH = {
    "scaled": lambda b, out: b["weight"].sum() * 0.1,
    "divided": lambda b, out: (b["weight"] / 1001).sum(),
    "selected": lambda b, out: jnp.where(b["mask"], b["weight"], 0.1).sum(),
    "jit": lambda b, out: scaled_sum(b["weight"]),
    "checkpoint": lambda b, out: jax.checkpoint(scaled_sum)(b["weight"]),
    "mask": lambda b, out: b["mask"].astype(out.dtype).sum(),
    "ones": lambda b, out: jnp.ones_like(out).sum(),
    "count": lambda b, out: (b["label"] != 2).astype(out.dtype).sum(),
    "counted outputs": lambda b, out: (out > -1000).astype(out.dtype).sum(),
    "one_hot": lambda b, out: jax.nn.one_hot(b["label"], 5, dtype=out.dtype).sum(0).max(),
    "scan": lambda b, out: over_chunks(b["weight"]),
    "while": lambda b, out: counted_down(b["weight"]),
    "cond": lambda b, out: jax.lax.cond(b["mask"][0], lambda w: w.mean() * 0.3, lambda w: w.mean(), b["weight"]),
    "custom_jvp": lambda b, out: jax.nn.softplus(b["y"]).sum(),
    "logsumexp": lambda b, out: jax.nn.logsumexp(b["y"]),
    "vmap": lambda b, out: jax.vmap(lambda a: a * 0.9)(b["weight"]).sum(),
    "sorted": lambda b, out: jnp.sort(b["weight"])[5] * 1.0,
    "cumulated": lambda b, out: jnp.cumsum(b["weight"])[-1],
    "deviation": lambda b, out: b["y"].std(),
    "normalized": lambda b, out: ((b["y"] - b["y"].mean()) / b["y"].std()).max(),
    "concatenated": lambda b, out: jnp.concatenate([b["y"], b["weight"]]).sum(),
    "indexed": lambda b, out: b["weight"][jnp.argsort(b["label"])][:333].sum(),
}


def outputs(params, x):
    return (jax.nn.relu(x @ params["w"]) @ params["v"])[:, 0]


PARAMS = {"w": jnp.ones((4, 3)), "v": jnp.ones((3, 1))}


def loss_fn(params, batch, rng):
    del rng
    out = outputs(params, batch["x"])
    metrics = {name: measure(batch, out) for name, measure in OF_BATCH.items()}
    metrics["error"] = jnp.abs(out - batch["y"]).mean()
    return jt.Loss.of((out - batch["y"]) ** 2, batch["weight"]), metrics


@functools.cache
def metrics_of(precision):
    step = jt.eval_step(loss_fn, precision=precision)
    state = jt.train_step(loss_fn, optax.sgd(0.0), precision=precision).init(PARAMS)
    return [
        {name: [float(x) for x in sums] for name, sums in step(state, random_batch(seed)).items()} for seed in range(3)
    ]


@pytest.mark.parametrize("precision", LOW)
def test_the_batch_reaches_the_loss_unrounded(precision):
    # The outputs are integers, which every precision has, so that the loss itself is that of float32.
    for found, expected in zip(metrics_of(precision), metrics_of("fp32"), strict=True):
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-6, err_msg=name)


def test_a_batch_is_as_exact_as_in_float64():
    for seed, found in enumerate(metrics_of("bf16_params")):
        batch = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in random_batch(seed).items()}
        errors = np.maximum(batch["x"].sum(1), 0) * 3 - batch["y"]
        np.testing.assert_allclose(found["loss"], [(errors**2 * batch["weight"]).sum(), batch["weight"].sum()], 1e-6)
        counts = {"count": (batch["label"] != 2).sum(), "mask": batch["mask"].sum(), "ones": ROWS}
        for name, count in counts.items():  # a mean, which is weighted like the loss
            np.testing.assert_allclose(found[name][0] / found[name][1], count, rtol=2e-7)


@pytest.mark.parametrize("precision", ["bf16_compute", "bf16_params"])
def test_the_model_computes_as_with_inputs_in_low_precision(precision):
    def model(params, batch):
        x = batch["x"] / 3 + 0.1
        hidden = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + x, h.sum()), x, params["blocks"])[0]
        return (hidden * batch["mask"].astype(x.dtype)[:, None]) @ params["head"]

    generator = np.random.default_rng(0)
    params = {"blocks": generator.standard_normal((2, 4, 4)), "head": generator.standard_normal((4, 2))}
    params = policy(precision).cast_params(jax.tree.map(jnp.float32, params))
    batch, apply = random_batch(0), policy(precision).apply
    found, expected = apply(model, batch_argnums=(1,))(params, batch), apply(model)(params, batch)
    assert found.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("precision", ["bf16_compute", "bf16_params", "fp16"])
def test_a_target_that_is_also_an_input_is_rounded_as_an_input_alone(precision):
    def autoencoder(params, batch, rng):
        error = batch["x"] @ params - batch["x"]
        return jt.Loss.of(error**2), {"first": batch["x"].sum()}

    x = np.random.default_rng(1).standard_normal((64, 4)).astype(np.float32)
    step = jt.eval_step(autoencoder, precision=precision)
    state = jt.train_step(autoencoder, optax.sgd(0.1), precision=precision).init(jnp.eye(4))
    low = x.astype(policy(precision).compute_dtype or jnp.bfloat16).astype(np.float32)
    sums = step(state, {"x": x})
    np.testing.assert_allclose(float(sums["loss"].total), ((low.astype(np.float64) - x) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(float(sums["first"].total) / x.size, x.sum(), rtol=1e-5)


def test_gradients_of_labels_that_are_not_rounded():
    torch = pytest.importorskip("torch")
    batch = random_batch(2, rows=64)

    def regression(params, batch, rng):
        return jt.Loss.of((batch["x"] @ params - batch["y"]) ** 2, batch["weight"]), {}

    step = jt.train_step(regression, optax.sgd(1.0), precision="bf16_compute")
    new, metrics = step(step.init(jnp.zeros(4)), batch)
    # As FSDP with MixedPrecision(param_dtype=bfloat16, cast_forward_inputs=True): the module's inputs are cast.
    x, y, weight = (torch.from_numpy(batch[name]) for name in ("x", "y", "weight"))
    w = torch.zeros(4, requires_grad=True)
    loss = ((x.bfloat16() @ w.bfloat16() - y) ** 2 * weight).sum() / weight.sum()
    loss.backward()
    np.testing.assert_allclose(float(metrics["loss"]), loss.item(), rtol=1e-6)
    np.testing.assert_allclose(-np.asarray(new.params), w.grad, rtol=2e-2)


@pytest.mark.parametrize("precision", ["bf16", "bf16_compute", "bf16_params", "fp8_block"])
@pytest.mark.parametrize("rows", [257, 2049, 70001])
def test_weights_count_rows_beyond_the_digits_of_low_precision(precision, rows):
    def counting(params, batch, rng):
        hidden = batch["x"] @ params["w"]
        return jt.Loss(hidden.sum() * 0.0, batch["weight"].sum()), {}

    step = jt.eval_step(counting, precision=precision)
    state = jt.train_step(counting, optax.sgd(0.1), precision=precision).init({"w": jnp.ones((16, 16))})
    batch = {"x": np.ones((rows, 16), np.float32), "weight": np.ones(rows, np.float32)}
    assert float(step(state, batch)["loss"].weight) == rows


@pytest.mark.parametrize("precision", ["bf16_compute", "bf16_params", "fp16"])
def test_sums_of_a_window_are_exact(precision):
    k, rows = 3, 1001

    def masked(params, batch, rng):
        error = batch["x"] @ params - batch["y"]
        return jt.Loss.of(error**2, batch["mask"].astype(error.dtype)), {"target": jt.Loss.of(batch["y"])}

    generator = np.random.default_rng(3)
    batch = {name: x for name, x in random_batch(3, k * rows).items() if name in ("x", "y")}
    batch["mask"] = generator.random(k * rows) < np.repeat(generator.random(k), rows)  # of uneven weights
    step = jt.train_step(masked, optax.sgd(0.0), precision=precision, accumulate=k, loss_scale=None)
    _, metrics = step(step.init(jnp.ones(4)), batch)
    found = [metrics]
    state = step.init(jnp.ones(4), streaming=True)
    for i in range(k):
        state, metrics = step.micro(state, {name: x[i * rows : (i + 1) * rows] for name, x in batch.items()})
    errors = (batch["x"].astype(np.float64).sum(1) - batch["y"]) ** 2
    for sums in (*found, metrics):
        assert float(sums["weight"]) == batch["mask"].sum()
        np.testing.assert_allclose(float(sums["loss"]), errors[batch["mask"]].mean(), rtol=1e-6)
    np.testing.assert_allclose(float(found[0]["target"]), batch["y"].mean(dtype=np.float64), rtol=1e-5)


def test_the_moving_average_of_low_precision_parameters_is_float32():
    decay, steps = 0.999, 40

    def pushed(params, batch, rng):
        return jt.Loss.of(params["w"] * batch["push"]), {}

    step = jt.train_step(pushed, optax.sgd(2.0**-4), precision="bf16_params", ema=decay)
    state, batch = step.init({"w": jnp.ones(1)}), {"push": np.full(1, -1.0, np.float32)}
    average = None
    for _ in range(steps):
        state, _ = step(state, batch)
        new = float(state.params["w"][0])
        average = new if average is None else average + (1 - decay) * (new - average)
    assert state.ema["w"].dtype == np.float32
    np.testing.assert_allclose(float(state.ema["w"][0]), average, rtol=1e-6)
    assert np.isfinite(float(jt.eval_step(pushed, precision="bf16_params")(averaged(state), batch)["loss"].total))
