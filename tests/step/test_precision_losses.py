"""`precision_losses` counts what a low precision rounds to zero, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.errors import UserError
from jaxtrain.passes import Policy
from jaxtrain.step import KINDS

LAYERS, WIDTH, ROWS = 3, 16, 8


def layers_of(params, x, *, scanned):
    """Apply blocks x @ w, whose gradients are `factor` times smaller in each layer towards the input."""
    apply = jt.block(lambda layer, x: layer["factor"] * (x @ layer["w"]))
    if scanned:
        return jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, params)[0]
    for i in range(LAYERS):
        x = apply(jax.tree.map(lambda leaf: leaf[i], params), x)  # noqa: B023
    return x


def make(rng, factors):
    w = rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 4
    # Vectors: under autocast they widen the result to float32, in which a scan carries it.
    return {"w": w, "factor": np.array(factors, np.float32)[:, None, None] * np.ones((1, WIDTH), np.float32)}


def loss_of(scanned):
    def loss_fn(params, batch, rng):
        x = params["gain"] * batch["x"]  # so that the input of layer 0 has a gradient, unrolled as in a scan
        out = layers_of(params["blocks"], x, scanned=scanned) @ params["head"]
        return jt.Loss.of((out * batch["c"]).astype(jnp.float32)), {}

    return loss_fn


def assert_same(one, other, apart=0):
    """Check that layers have the same counts, up to some elements that are in the next interval."""
    for a, b in zip(one.layers, other.layers, strict=True):
        for kind in KINDS:
            counts = [np.cumsum(getattr(layer, kind).counts) for layer in (a, b)]
            assert counts[0][-1] == counts[1][-1], (a.name, kind)
            assert np.abs(counts[0] - counts[1]).max() <= apart, (a.name, kind, *map(str, counts))


@pytest.fixture(scope="module")
def case():
    """Return parameters and a batch; layers 0 and 1 lose gradients, because layer 1 multiplies them by 2^-16."""
    rng = np.random.default_rng(0)
    head = rng.standard_normal((WIDTH, 4)).astype(np.float32)
    params = {"blocks": make(rng, [1, 2.0**-16, 2.0**-2]), "head": head, "gain": np.ones((1, WIDTH), np.float32)}
    batch = {
        "x": (2.0**10 * rng.standard_normal((ROWS, WIDTH))).astype(np.float32),
        "c": rng.standard_normal((ROWS, 4)).astype(np.float32),
    }
    return params, batch


def step_of(scanned=True, **options):
    scale = {"loss_scale": jt.static_loss_scale(1.0)} | options
    return jt.train_step(loss_of(scanned), optax.sgd(0.0), precision="fp16", **scale)


def truth(params, batch, layer):
    """Return the gradients, in float64, of the results of a layer's product and of its weight."""
    blocks = jax.tree.map(lambda x: np.asarray(x, np.float64), params["blocks"])
    x = batch["x"].astype(np.float64)
    inputs = []
    for w, factor in zip(blocks["w"], blocks["factor"], strict=True):
        inputs.append(x)
        x = factor * (x @ w)
    g = batch["c"].astype(np.float64) @ params["head"].T.astype(np.float64) / batch["c"].size
    for i in reversed(range(layer, LAYERS)):
        g = blocks["factor"][i] * g  # of the product of layer i
        if i == layer:
            return g, inputs[i].T @ g
        g = g @ blocks["w"][i].T
    raise AssertionError


def test_a_loss_is_attributed_to_its_layer_in_scans_and_unrolled(case):
    params, batch = case
    found = []
    for scanned in (True, False):
        step = step_of(scanned)
        found.append(jt.precision_losses(step)(step.init(params), batch))
    scanned, unrolled = found
    assert [layer.name for layer in scanned.layers] == ["layer 0", "layer 1", "layer 2", "after the layers"]
    assert_same(scanned, unrolled)
    for i, layer in enumerate(scanned.layers[:3]):
        # Elements of x, of x @ w and of their gradients; w and its gradient.
        assert layer.weights.total == layer.weight_gradients.total == WIDTH**2
        of_product, of_weight = (np.abs(x) for x in truth(params, batch, i))
        smallest = 2.0**-25
        assert layer.weight_gradients.underflow == pytest.approx((of_weight <= smallest).sum(), abs=2)
        assert layer.activation_gradients.underflow >= (of_product <= smallest).sum() - 2
        assert (layer.activation_gradients.lost > 0.01) == (i < 2)
    lost = {f"{x.name}/{kind}" for x in scanned.layers for kind in KINDS if getattr(x, kind).lost > 0.01}
    assert lost == scanned.advice_by_kind().keys() == {"layer 0/activation_gradients", "layer 1/activation_gradients"}
    assert len(scanned.advice()) == 2
    assert scanned.advice()[0].startswith(f"layer 0: {scanned.layers[0].activation_gradients.lost:.1%} of the")
    assert type(scanned).from_json(scanned.to_json()) == scanned


def test_elements_that_are_zero_in_float16_and_not_in_float64_are_counted():
    """One row of powers of 2: products are exact, so that what float16 rounds to zero is known element by element."""
    rng = np.random.default_rng(1)
    x = 2.0 ** -rng.integers(0, 14, (1, 64)).astype(np.float32)
    c = 2.0 ** -rng.integers(6, 22, (1, 32)).astype(np.float32)

    def loss_fn(params, batch, rng):
        return jt.Loss(((batch["x"] @ params).astype(jnp.float32) * batch["c"]).sum(), 1), {}

    w, batch = rng.standard_normal((64, 32)).astype(np.float32), {"x": x, "c": c}
    step = jt.train_step(loss_fn, optax.sgd(0.0), precision="fp16", loss_scale=jt.static_loss_scale(2.0))
    state = step.init(w)
    found = jt.precision_losses(step)(state, batch).layers[0]
    compute = jt.autocast(lambda w: 2 * loss_fn(w, batch, None)[0].total, np.float16)
    in_float16 = np.asarray(jax.grad(compute)(w))
    in_float64 = 2 * x.T.astype(np.float64) * c
    lost = int(((in_float16 == 0) & (in_float64 != 0)).sum())
    assert found.weight_gradients.underflow == lost > 200
    assert found.weight_gradients.total == w.size
    assert found.weight_gradients.subnormal == int(((in_float16 != 0) & (np.abs(in_float16) < 2.0**-14)).sum()) > 200
    assert found.activations.total == x.size + 32


def test_the_loss_scale_the_window_and_a_mesh_are_those_of_the_step(case):
    params, batch = case
    whole = {name: np.concatenate([x, 100 * x]) for name, x in batch.items()}
    step = step_of(accumulate=2, loss_scale=jt.static_loss_scale(2.0**9))
    scaled = jt.precision_losses(step)(step.init(params), whole)
    plain = jt.precision_losses(step_of(loss_scale=jt.static_loss_scale(2.0**8)))
    assert scaled.loss_scale == 2.0**9
    # The first micro-batch, whose mean is divided by 2.
    assert_same(scaled, plain(step_of(loss_scale=jt.static_loss_scale(2.0**8)).init(params), batch))
    of_layers = step_of(loss_scale=jt.per_layer_loss_scale(LAYERS, init_scale=2.0**8))
    assert_same(scaled, jt.precision_losses(of_layers)(of_layers.init(params), batch))
    sharded = shard(step, make_mesh("fsdp=2,data=2", jax.devices()[:4]))
    on_mesh = jt.precision_losses(sharded)(sharded.init(params), whole)
    assert_same(scaled, on_mesh, apart=2)  # sums over devices are added in another order


def test_frozen_parameters_have_no_gradient_and_state_is_unchanged(case):
    params, batch = case
    step = step_of(frozen=lambda path: path.startswith(("blocks", "gain")))
    state = step.init(params)
    before = jax.tree.map(np.asarray, state.params)
    losses = jt.precision_losses(step)(state, batch)
    assert [layer.weight_gradients.total for layer in losses.layers] == [0, 0, 0, 4 * WIDTH]
    assert [layer.activation_gradients.total > 0 for layer in losses.layers] == [False, False, False, True]
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


@pytest.mark.parametrize("precision", ["fp8", "fp8_row", "fp8_block"])
def test_operands_in_8_bits_are_counted_after_scaling(precision):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((32, 16)) * 2.0 ** rng.integers(-20, 0, (32, 16))).astype(np.float32)
    c = (rng.standard_normal((32, 32)) * 2.0 ** rng.integers(-40, 0, (32, 32))).astype(np.float32)

    def loss_fn(params, batch, rng):
        return jt.Loss((batch["x"] @ params["w"] * batch["c"]).sum(), 1), {}

    step = jt.train_step(loss_fn, optax.sgd(0.0), precision=precision)
    w = rng.standard_normal((16, 32)).astype(np.float32)
    losses = jt.precision_losses(step)(step.init({"w": w}), {"x": x, "c": c})
    gradient = jnp.float8_e5m2 if precision == "fp8" else jnp.float8_e4m3fn
    assert (losses.dtype, losses.gradient_dtype) == ("float8_e4m3fn", np.dtype(gradient).name)
    axis = None if precision == "fp8" else 1
    for of, magnitudes, dtype in (
        (x, losses.layers[0].activations, jnp.float8_e4m3fn),
        (c, losses.layers[0].activation_gradients, gradient),
    ):
        low = np.asarray(of, jnp.bfloat16).astype(np.float32)
        scale = np.float32(jnp.finfo(dtype).max) / np.abs(low).max(axis, keepdims=True)
        if precision == "fp8_row":
            scale = 2.0 ** np.floor(np.log2(scale))
        scaled = low * scale
        assert magnitudes.underflow == int(((scaled.astype(dtype).astype(np.float32) == 0) & (low != 0)).sum()) > 10
        assert magnitudes.overflow == 0
    assert losses.layers[0].weights.total == w.size if precision != "fp8_block" else 128 * 128
    assert all("fp8_row" in line for line in losses.advice())


def test_what_cannot_be_measured_is_refused(case):
    step = jt.train_step(loss_of(True), optax.sgd(0.0))
    with pytest.raises(UserError, match='computes in float32: use precision="fp16"'):
        jt.precision_losses(step)
    params, batch = case
    low = jt.train_step(loss_of(True), optax.sgd(0.0), precision=Policy(np.float32, np.float16, cast_inputs=True))
    counted = jt.precision_losses(low)(low.init(params), batch)
    assert sum(layer.weights.total for layer in counted.layers) >= LAYERS * WIDTH**2
