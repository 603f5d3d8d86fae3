"""Per-layer loss scales: the same updates to the bit, one decision for a window, a scale that follows its own block."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxtrain as jt
from docs.images import layer_scales
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.labs.loss_scales import BlockValues, per_layer_loss_scale
from jaxtrain.step.loss_scale import current_scale, found_inf, skipped_updates, state_dict

WIDTH, BLOCKS, ROWS = 8, 3, 4


def _loss_fn(params, batch, rng):
    layer = jt.block(lambda w, x: jnp.tanh(x @ w) + x)
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), batch["x"] @ params["embed"], params["layers"])
    losses = jnp.square(x @ params["embed"].T - batch["x"]).mean(-1) * batch["factor"]
    return jt.Loss(losses.sum(), weight=len(losses)), {}


def _params():
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((1 + BLOCKS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    return {"embed": matrices[0], "layers": matrices[1:]}


def _batch(factor=1.0):
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "factor": np.full(ROWS, factor, np.float32)}


def _scaler(**options):
    return per_layer_loss_scale(BLOCKS, init_scale=256.0, growth_interval=3, **options)


@functools.cache
def _step(**options):
    options = {"precision": "fp16", "accumulate": 2, "loss_scale": _scaler()} | options
    return jt.train_step(_loss_fn, optax.adam(1e-2), **options)


def _with_scales(state, exponents):
    scale = np.ldexp(np.float32(1), exponents)
    return state._replace(loss_scale=state.loss_scale._replace(blocks=state.loss_scale.blocks._replace(scale=scale)))


def _updated(step, exponents, updates=2):
    state = _with_scales(step.init(_params()), np.asarray(exponents))
    for _ in range(updates):
        state, _ = step(state, _batch())
    return state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "fp32", "clip_norm": 1.0},
        {"remat": "full"},
        {"unroll": True, "accumulate": 1},
        {"precision": "bf16", "ema": 0.9},
    ],
    ids=["fp16", "fp32", "remat", "unroll", "bf16"],
)
def test_updates_have_the_same_bits_with_any_scales(options):
    step = _step(**options)
    expected = _updated(step, [8] * BLOCKS)
    for exponents in ([10, 8, 5], [6, 9, 7]):
        actual = _updated(step, exponents)
        for name in ("params", "opt_state", "ema"):
            jax.tree.map(np.testing.assert_array_equal, getattr(actual, name), getattr(expected, name))
        assert not actual.loss_scale.found_inf


@pytest.mark.parametrize("overflowing", [None, 0, 1], ids=["no overflow", "in the first", "in the last"])
def test_streamed_micro_batches_give_the_state_of_the_window(overflowing):
    step, exponents = _step(), np.array([10, 8, 5])
    rows = np.full(ROWS, 1.0, np.float32)
    if overflowing is not None:  # Only the gradients of this micro-batch are large enough to overflow in block 1.
        exponents[1] = 24
        rows[2 * (1 - overflowing) : 2 * (1 - overflowing) + 2] = 1e-6
    batch = _batch(rows)
    window = _with_scales(step.init(_params()), exponents)
    state = _with_scales(step.init(_params(), streaming=True), exponents)
    for i in range(4):
        state, _ = step.micro(state, jax.tree.map(operator.itemgetter(slice(2 * (i % 2), 2 * (i % 2) + 2)), batch))
        if i % 2 == 0:
            window, _ = step(window, batch)
    jax.tree.map(np.testing.assert_array_equal, state._replace(window=None, rng=0), window._replace(rng=0))
    assert int(skipped_updates(window.loss_scale)) == (0 if overflowing is None else 2)
    expected = exponents - (0 if overflowing is None else np.array([0, 2, 0]))
    np.testing.assert_array_equal(window.loss_scale.blocks.scale, np.exp2(expected))


@pytest.mark.parametrize("mesh", ["data=4", "fsdp=4", "dcn=2,fsdp=2"])
def test_an_overflow_on_one_device_backs_off_its_block_on_all(mesh):
    """Only the gradients of one row, which is on one device in one micro-batch, overflow in the second block."""
    step = shard(_step(), make_mesh(mesh))
    rows = np.full(2 * ROWS, 1e-6, np.float32)
    rows[5] = 1.0
    state = _with_scales(step.init(_params()), np.array([10, 24, 5]))
    before = jax.device_get(state.params)
    state, metrics = step(state, jax.tree.map(lambda x: np.concatenate([x, x]), _batch()) | {"factor": rows})
    assert metrics["skipped"]
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    np.testing.assert_array_equal(state.loss_scale.blocks.scale, [2.0**10, 2.0**23, 2.0**5])
    assert float(current_scale(state.loss_scale)) == 256


@pytest.mark.parametrize("mesh", ["data=4", "fsdp=4", "data=2,fsdp=2", "fsdp=2,tensor=2"])
def test_a_mesh_gives_the_updates_and_scales_of_one_device(mesh):
    options = {"precision": "fp32", "loss_scale": _scaler(underflow=1e-3)}
    batch = jax.tree.map(lambda x: np.concatenate([x, x / 2]), _batch())
    specs = {"layers": PartitionSpec(None, None, "tensor"), "embed": PartitionSpec("fsdp")}
    rules = specs if "tensor" in mesh else None
    states = []
    for step in (_step(**options), shard(_step(**options), make_mesh(mesh), rules)):
        state = step.init(_params())
        for _ in range(3):
            state, _ = step(state, batch)
        states.append(jax.device_get(state._replace(rng=0)))
    one, many = states
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), many.params, one.params)
    jax.tree.map(np.testing.assert_array_equal, many.loss_scale, one.loss_scale)


def test_an_overflow_in_one_block_backs_off_that_block_alone():
    step = _step()
    state = _with_scales(step.init(_params()), np.array([8, 24, 8]))
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, _batch())
    assert metrics["skipped"]
    assert float(metrics["loss_scale"]) == 256
    np.testing.assert_array_equal(metrics["loss_scales"], [2.0**8, 2.0**24, 2.0**8])
    np.testing.assert_array_equal(state.loss_scale.blocks.scale, [2.0**8, 2.0**23, 2.0**8])
    assert float(current_scale(state.loss_scale)) == 256
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    while metrics["skipped"]:
        state, metrics = step(state, _batch())
    assert float(state.loss_scale.blocks.scale[1]) < 2.0**20
    np.testing.assert_array_equal(state.loss_scale.blocks.scale[::2], 2.0**8)
    state, metrics = step(state, _batch(factor=np.inf))  # outside of all blocks
    assert found_inf(state.loss_scale)
    assert float(state.loss_scale.scale) == 128
    np.testing.assert_array_equal(state.loss_scale.blocks.scale[::2], 2.0**8)
    assert int(skipped_updates(state.loss_scale)) == int(metrics["attempted"]) - 1


def _model_of_rule(scale, tracker, overflows, skipped, interval, bounds):
    """Return one scale and its tracker after an update, by the rule of the documentation, in NumPy."""
    if overflows:
        return max(scale / 2, bounds[0]), 0
    if not skipped:
        tracker += 1
    return (min(2 * scale, bounds[1]), 0) if tracker == interval else (scale, tracker)


@pytest.mark.parametrize("underflow", [None, 1e-3])
def test_scales_follow_the_rule(underflow):
    interval, bounds, updates = 2, (2.0**-3, 2.0**20), 60
    scaler = per_layer_loss_scale(
        BLOCKS, underflow=underflow, init_scale=2.0, growth_interval=interval, min_scale=bounds[0], max_scale=bounds[1]
    )
    rng = np.random.default_rng(0)
    of_block = rng.random((updates, BLOCKS)) < 0.15
    bad = of_block.any(1) | (rng.random(updates) < 0.15)
    chosen = np.exp2(rng.integers(-30, 30, (updates, BLOCKS))).astype(np.float32)

    def update(state, of_update):
        overflow, is_bad, chosen = of_update
        observed = BlockValues(chosen, overflow.astype(np.float32))
        _, new = scaler.update(jnp.where(is_bad, jnp.nan, jnp.ones(2)), state, observed=observed)
        return new, (state.scale, new.scale, new.growth_tracker, new.blocks)

    _, (before, of_loss, tracker_of_loss, blocks) = jax.jit(functools.partial(jax.lax.scan, update))(
        scaler.init(None), (of_block, bad, chosen)
    )
    factors = blocks.scale if underflow is None else blocks.backoff
    if underflow is not None:
        np.testing.assert_array_equal(blocks.scale, chosen * before[:, None])
    loss, models = (2.0, 0), [(2.0 if underflow is None else 1.0, 0)] * BLOCKS
    for t in range(updates):
        loss = _model_of_rule(*loss, bad[t] and not of_block[t].any(), bad[t], interval, bounds)
        assert (of_loss[t], tracker_of_loss[t]) == loss
        for i in range(BLOCKS):
            of_factors = bounds if underflow is None else (0, 1)
            models[i] = _model_of_rule(*models[i], of_block[t, i], bad[t], interval, of_factors)
            assert (factors[t, i], blocks.growth_tracker[t, i]) == models[i]


def test_mistakes_are_named():
    wrong = jt.train_step(_loss_fn, optax.sgd(0.1), loss_scale=per_layer_loss_scale(12))
    with pytest.raises(jt.UserError, match=r"^per_layer_loss_scale has blocks=12, but the program has 3: use blocks=3"):
        wrong(wrong.init(_params()), _batch())
    with pytest.raises(jt.UserError, match=r"^per_layer_loss_scale is not supported in a pipeline: use other axes"):
        shard(wrong, make_mesh("pipeline=4"), {"layers": PartitionSpec("pipeline")})
    plain = jt.train_step(_loss_fn, optax.sgd(0.1), precision="fp16")
    with pytest.raises(
        jt.UserError, match=r"^the state has a loss scale .*, but this step expects loss scales by layer"
    ):
        wrong(plain.init(_params()), _batch())
    for options, message in {
        "blocks=0": "blocks must be an integer of at least 1",
        "blocks=1, underflow=1.0": "underflow must be in",
        "blocks=1, init_scale=3.0": "init_scale must be a power of two",
        "blocks=1, init_scale=2.0**-30": "init_scale .* must be in",
        "blocks=1, growth_interval=0": "growth_interval must be",
    }.items():
        with pytest.raises(jt.UserError, match=message):
            eval(f"per_layer_loss_scale({options})")
    state = _scaler().init(None)
    assert state_dict(_scaler(), state) == {
        "scale": 256.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 0,
    }


def test_layers_apart_lose_nothing():
    """Layers whose gradients are 2¹² apart: one scale loses a fifth of the gradients; adaptive scales lose none."""
    one = layer_scales.train("fp16", 24, jt.dynamic_loss_scale(growth_interval=10))
    adaptive = layer_scales.train("fp16", 24, layer_scales.adaptive())
    assert np.nanmean(one.lost) > 0.1
    assert adaptive.lost.max() == 0
    assert not adaptive.skipped.any()


def test_layers_apart_are_trained_as_in_float32():
    """The distance to float32 is at most twice that of rounding to float16's bits without its range."""
    runs = layer_scales.runs(400)
    truth, rounded, one, _, adaptive = runs.values()
    assert np.nanmean(one.lost) > 0.1
    assert adaptive.lost.max() == 0
    assert not adaptive.skipped.any()
    bound = 2 * layer_scales.distance(rounded, truth)
    assert layer_scales.distance(adaptive, truth) <= bound < layer_scales.distance(one, truth)
