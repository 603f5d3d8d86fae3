"""Updated bfloat16 parameters are rounded to nearest, stochastically without bias, or with Kahan compensation."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.planning.state_parts import state_parts
from jaxtrain.step.state import micro_batch_key, rounding_key
from jaxtrain.step.update import rounding
from tests.step.regression import assert_same_bits

ROUNDINGS = ("nearest", "stochastic", "kahan")
LARGEST = float(jnp.finfo(jnp.bfloat16).max)
BITS = np.arange(2**16, dtype=np.uint32)


def bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


def patterns(*words):
    """float32 numbers by their bits."""
    return np.array(words, np.uint32).view(np.float32)


BETWEEN = np.concatenate(
    [
        np.float32([1 / 3, -1 / 3, 1 + 2.0**-8, 3.14159, -1e-30, 1e30, 1.1754944e-38]),
        patterns(0x3F800001, 0x3F80FFFF, 0xBF807FFF, 0x00000001, 0x00018000, 0x7F7EFFFF),
    ]
)


@functools.cache
def rounded_by_all_patterns():
    """Every number of `BETWEEN` rounded with each of the 65,536 random numbers, float32 [numbers, 65536]."""
    of_all = jax.jit(lambda x, bits: rounding.stochastic_round(x[:, None], bits[None]).astype(np.float32))
    return np.asarray(of_all(BETWEEN, BITS))


def test_the_expectation_of_stochastic_rounding_is_exact():
    # Over all random numbers, not a sample of them. float64 holds the sums exactly.
    scale = np.exp2(-np.floor(np.log2(np.abs(BETWEEN.astype(np.float64)))))
    rounded = rounded_by_all_patterns() * scale[:, None]
    np.testing.assert_array_equal(rounded.mean(1), BETWEEN * scale)
    assert all(len(np.unique(row)) <= 2 for row in rounded)


def test_stochastic_rounding_has_torchaos_distribution(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim.quant_utils import _fp32_to_bf16_sr
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: torch.from_numpy(BITS.astype(np.int32)))
    for x, ours in zip(BETWEEN, rounded_by_all_patterns(), strict=True):
        theirs = _fp32_to_bf16_sr(torch.full((2**16,), float(x))).float().numpy()
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


def test_stochastic_rounding_leaves_numbers_of_bfloat16_inf_and_nan():
    # NaN among them with patterns that an addition would carry into inf or zero.
    fixed = np.concatenate([patterns(0x80000000, 0, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF)])
    fixed = np.concatenate([fixed, np.float32([np.inf, -np.inf, 1.5, -LARGEST, 2.0**-126])])
    beyond = patterns(0x7F7F0001, 0x7F7F7FFF, 0xFF7F7FFF, 0x7F7F8000, 0x7F7FFFFF)
    x = np.concatenate([fixed, beyond])
    for bits in (0, 1, 0x8000, 0xFFFF):
        rounded = rounding.stochastic_round(jnp.asarray(x), jnp.full(x.shape, bits, np.uint32)).astype(np.float32)
        nearest = jnp.asarray(x).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.signbit(rounded), np.signbit(nearest))
        np.testing.assert_array_equal(rounded, nearest)
    # Up to half a unit beyond the largest number nothing is rounded to inf.
    np.testing.assert_array_equal(nearest[-5:], [LARGEST, LARGEST, -LARGEST, np.inf, np.inf])


def test_random_bits_are_threefrys_and_differ_between_leaves_elements_and_updates(monkeypatch):
    words = jax.random.bits(jax.random.key(1), (2,), np.uint32)
    shape, leaf = (3, 2, 5), 4
    bits = np.asarray(rounding._random_bits(words, shape, leaf, leaves=7))
    index = np.arange(32, dtype=np.uint32)
    low, high = threefry2x32_p.bind(*(jnp.broadcast_to(w, (8,)) for w in (*words, np.uint32(leaf))), index[:8])
    halves = np.stack([low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16], 1)
    np.testing.assert_array_equal(bits.reshape(-1), halves.reshape(-1)[: bits.size])
    # Blocks of an array that is too long for one word of the counter have words of their own.
    monkeypatch.setattr(rounding, "_BLOCK", 10)
    blocks = np.asarray(rounding._random_bits(words, shape, leaf, leaves=7))
    for i in range(3):
        np.testing.assert_array_equal(blocks[i], rounding._random_bits(words, shape[1:], leaf + 7 * i, leaves=7))
    # Kept apart from the keys of micro-batches, and from each other.
    keys = [rounding_key(jax.random.key(0), step) for step in range(3)]
    keys += [micro_batch_key(jax.random.key(0), i) for i in range(4)]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == len(keys)
    leaves = {"a": bf16(np.ones(4096)), "b": bf16(np.ones(4096))}
    new, _ = rounding.apply_updates(
        "stochastic", leaves, jax.tree.map(lambda x: jnp.full(x.shape, 0.002), leaves), None, keys[0]
    )
    ups = [np.asarray(x > 1) for x in new.values()]
    share = 0.002 * 2**7  # 0.256; of independent bits the share of pairs is its square
    np.testing.assert_allclose([*map(np.mean, ups), np.mean(ups[0] & ups[1])], [share, share, share**2], atol=0.03)


def torch_kahan(param, update, compensation):
    """`kahan_sum` of optimi's optimizers, its numbers loaded into float32."""
    compensation = compensation.float() + update
    before, param = param, (param.float() + compensation).bfloat16()
    return param, (compensation + (before.float() - param.float())).bfloat16()


def test_kahan_compensation_is_the_published_formula_to_the_bit():
    draw = np.random.default_rng(0)
    start = draw.normal(size=256).astype(np.float32)
    start[:2] = 0.0, -0.0
    sizes = 10.0 ** draw.uniform(-6, 1, size=(64, 256))
    updates = (draw.normal(size=(64, 256)) * sizes).astype(np.float32)

    @jax.jit
    def run(params, updates):
        def one(carry, update):
            return (new := rounding.apply_updates("kahan", carry[0], update, carry[1], jax.random.key(0))), new

        return lax.scan(one, (params, jnp.zeros_like(params)), updates)[1]

    ours, excess = run(bf16(start), updates)
    param, compensation = torch.from_numpy(start).bfloat16(), torch.zeros(256).bfloat16()
    for i, update in enumerate(updates):
        param, compensation = torch_kahan(param, torch.from_numpy(update), compensation)
        np.testing.assert_array_equal(ours[i].astype(np.float32), param.float())
        np.testing.assert_array_equal(-excess[i].astype(np.float32), compensation.float())  # stored with the other sign
    # Parameters that are infinite on purpose remain so, where inf - inf would be NaN.
    infinite = bf16([np.inf, -np.inf])
    updates = np.ones((3, 2), np.float32)
    assert_same_bits(run(infinite, updates)[0][-1], infinite)


def test_kahan_sums_what_nearest_rounding_loses():
    updates = np.random.default_rng(0).uniform(0, 1e-3, size=(1600, 32)).astype(np.float32)
    start = bf16(np.full(32, 1.0))

    @functools.partial(jax.jit, static_argnums=0)
    def total(how, updates):
        def one(carry, x):
            i, update = x
            key = rounding_key(jax.random.key(0), i)
            return rounding.apply_updates(how, carry[0], update, carry[1], key), None

        carry = start, rounding.init_compensation(how, start)
        return lax.scan(one, carry, (jnp.arange(len(updates)), updates))[0][0].astype(np.float32)

    true = 1.0 + updates.astype(np.float64).sum(0)
    nearest, stochastic, kahan = (np.asarray(total(how, updates), np.float64) for how in ROUNDINGS)
    assert (nearest == 1.0).all()
    assert (abs(kahan - true) <= 2.0**-7).all()  # a unit in the last place below 2
    assert abs(stochastic - true).mean() < 0.2
    assert abs((stochastic - true).mean()) < 0.1  # about three standard deviations


def loss_fn(params, batch, rng):
    """A loss whose gradients are sums of the batch: exact for small integers."""
    del rng
    return jt.Loss((batch @ params["w"]).sum() + batch.sum() * params["b"]["v"].sum(), len(batch)), {}


def initial():
    return {"w": np.arange(32.0).reshape(8, 4) / 16, "b": {"v": np.array([0.5, -0.0]), "fixed": np.ones(3)}}


@functools.cache
def step_of(how, rate=2.0**-4):
    return jt.train_step(
        loss_fn,
        optax.sgd(rate),
        precision=jt.Policy(jnp.bfloat16, param_rounding=how),
        accumulate=2,
        clip_norm=1e6,
        frozen=lambda path: path.endswith("fixed"),
        ema=0.5,
        loss_scale=jt.dynamic_loss_scale(2.0**8),
    )


WINDOWS = np.random.default_rng(0).integers(-2, 3, size=(6, 4, 8)).astype(np.float32)


def trained(step, windows, state):
    for window in windows:
        state, _ = step(state, window)
    return state


def test_the_three_roundings_are_the_same_bits_where_nothing_is_rounded():
    nearest, stochastic, kahan = (
        trained(step_of(how), WINDOWS, step_of(how).init(initial(), seed=1)) for how in ROUNDINGS
    )
    assert (np.asarray(nearest.params["w"]) != initial()["w"]).any()
    assert_same_bits(nearest, stochastic)
    assert_same_bits(nearest, kahan._replace(compensation=None))
    assert not any(map(np.any, jax.tree.leaves(kahan.compensation)))


@pytest.mark.parametrize("how", ROUNDINGS[1:])
def test_windows_and_streams_are_the_same_bits_and_skipped_updates_change_nothing(how):
    step = step_of(how, 1e-3)
    start = functools.partial(step.init, initial(), seed=1)
    whole = trained(step, WINDOWS, start())
    streamed = start(streaming=True)
    for window in WINDOWS:
        for half in (window[:2], window[2:]):
            streamed, _ = step.micro(streamed, half)
    assert_same_bits(whole, streamed._replace(window=None))
    # Interrupted: only numbers of the state are carried over.
    half = trained(step, WINDOWS[:3], start())
    keys = jax.random.key_data(half.rng)
    numbers = jax.tree.map(np.array, half._replace(rng=None))
    resumed = jax.tree.map(jnp.asarray, numbers)._replace(rng=jax.random.wrap_key_data(keys))
    assert_same_bits(whole, trained(step, WINDOWS[3:], resumed))
    another_seed = trained(step, WINDOWS, step.init(initial(), seed=2))
    same = (another_seed.params["w"] == whole.params["w"]).all()
    assert bool(same) == (how == "kahan")
    # A skipped one.
    before = jax.tree.map(np.array, (whole.params, whole.opt_state, whole.compensation, whole.ema))
    skipped, metrics = step(whole, np.full_like(WINDOWS[0], np.inf))
    assert metrics["skipped"]
    assert_same_bits(before, (skipped.params, skipped.opt_state, skipped.compensation, skipped.ema))
    assert (how == "kahan") == any(map(np.any, jax.tree.leaves(before[2])))


@pytest.mark.parametrize("how", ROUNDINGS[1:])
def test_a_mesh_rounds_to_the_bits_of_one_device(how):
    step = step_of(how, 1e-3)
    alone = trained(step, WINDOWS, step.init(initial(), seed=1))
    parallel = shard(step, make_mesh("fsdp=2,tensor=2"), {"w": PartitionSpec("fsdp", "tensor"), ".*": PartitionSpec()})
    state = trained(parallel, WINDOWS, parallel.init(initial(), seed=1))
    assert_same_bits(alone.params, state.params)
    assert_same_bits(alone.compensation, state.compensation)
    for kept in (state.params, state.ema, state.compensation or state.ema):
        assert kept["w"].sharding.shard_shape(kept["w"].shape) == (4, 2)


def test_the_compensation_is_counted_and_must_fit_the_step():
    step = step_of("kahan")
    parts = {
        (part.name, part.dtype): part.bytes for part in state_parts(step.shapes(initial()), step.parts.options.frozen)
    }
    assert parts["compensation of the parameters", "bfloat16"] == parts["trained parameters", "bfloat16"] == 2 * 34
    with pytest.raises(jt.UserError, match=r"has no compensation .* param_rounding 'kahan'"):
        step(step_of("nearest").init(initial()), WINDOWS[0])
    with pytest.raises(jt.UserError, match=r"has a compensation .* param_rounding 'nearest'"):
        step_of("nearest")(step.init(initial()), WINDOWS[0])
    with pytest.raises(jt.UserError, match="got param_dtype float32: use precision 'bf16_params_kahan'"):
        jt.Policy(np.float32, param_rounding="kahan")
    with pytest.raises(jt.UserError, match="got 'up': use 'nearest'"):
        jt.Policy(jnp.bfloat16, param_rounding="up")
