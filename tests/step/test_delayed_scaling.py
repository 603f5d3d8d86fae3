"""Delayed scaling of fp8 products follows TransformerEngine's formulas, in windows, on meshes and across restarts."""

import collections
import contextlib
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.passes import Fp8
from jaxtrain.planning import state_parts
from jaxtrain.runner.state_files import StateFiles
from jaxtrain.step import TrainState
from tests.distributed.programs import choose_program

K = 3
WEIGHTS = (1.0, 1.0, 2.0)
LEARNING_RATE = 2.0**-16
FORMATS = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2
PATHS = "layers", "layers", "shared", "shared"
"""The kernel of each product, in order: two layers, and one that is used twice."""


def policy(**settings):
    return jt.Policy(np.float32, jnp.bfloat16, fp8=Fp8("delayed", **settings))


def loss_fn(params, batch, rng):
    h, _ = jax.lax.scan(lambda h, w: (h @ w, None), batch["x"], params["layers"])
    y = h @ params["shared"] @ params["shared"]
    return jt.Loss((y * batch["c"]).sum(), batch["weight"].sum()), {}


def parameters():
    def random(seed, *shape):
        return jnp.asarray(np.random.RandomState(seed).choice([1.0, 1.25, 1.5, 1.75], shape), jnp.float32)

    return {"layers": random(0, 2, 16, 16), "shared": random(1, 16, 16)}


def batches(updates):
    """Return windows of 3 micro-batches of 4 rows: without gradients, growing, and with a sudden overflow."""
    rng = np.random.RandomState(2)
    for i in range(updates):
        of_x, of_c = np.ones(K), np.full(K, 2.0**-10)
        if i < 2 or i == 9:
            of_c[:] = 0
        if 5 <= i < 9:
            of_x *= 2.0 ** (i - 4)
        if i == 12:
            of_x[1], of_c[2] = 2.0**12, 2.0**12
        x, c = (np.float32(rng.choice([1.0, 1.25, 1.5, 1.75], (K, 4, 16)) * f[:, None, None]) for f in (of_x, of_c))
        weight = np.repeat(np.float32(WEIGHTS)[:, None] / 4, 4, 1)
        yield {"x": x.reshape(-1, 16), "c": c.reshape(-1, 16), "weight": weight.reshape(-1)}


class Meta:
    """Scales and histories of a kernel, as `_amax_and_scale_update` of TransformerEngine updates them."""

    def __init__(self, fp8):
        self.fp8, self.scale = fp8, torch.ones(3)
        self.history = torch.zeros(fp8.history, 3)

    def update(self):
        amax = self.history.max(0).values if self.fp8.algorithm == "max" else self.history[0].clone()
        if len(self.history) > 1:
            self.history = torch.roll(self.history, -1, 0)
        self.history[0] = 0
        fp8_max = torch.tensor([torch.finfo(dtype).max for dtype in FORMATS])
        scale = (fp8_max / amax) / 2**self.fp8.margin
        scale = torch.where(amax > 0, scale, self.scale)
        self.scale = torch.where(torch.isfinite(amax), scale, self.scale)

    def quantize(self, i, x):
        """Record the largest magnitude, and return the numbers in 8 bits with their scale."""
        self.history[0, i] = torch.maximum(self.history[0, i], x.abs().max())
        largest = torch.finfo(FORMATS[i]).max
        return (x * self.scale[i]).clamp(-largest, largest).to(FORMATS[i]).double(), self.scale[i]


def product(a, b):
    """Multiply numbers in 8 bits, exactly, unscale in float32 and round to bfloat16."""
    (a, of_a), (b, of_b) = a, b
    terms = np.int64(a[:, :, None].numpy() * b[None].numpy() * 2.0**25)
    assert (np.abs(terms).sum(1) / np.maximum(np.gcd.reduce(terms, 1), 1)).max() < 2**24  # exact in float32
    return ((a @ b).float() * (1 / of_a) * (1 / of_b)).bfloat16().float()


class Reference:
    """The training loop in PyTorch."""

    def __init__(self, fp8):
        params = {name: torch.tensor(np.asarray(x)) for name, x in parameters().items()}
        self.kernels = [*params["layers"], params["shared"]]
        self.metas = [Meta(fp8) for _ in self.kernels]

    def step(self, batch):
        sums = [torch.zeros(16, 16) for _ in self.kernels]
        micro_batches = ({name: torch.tensor(x[i * 4 : i * 4 + 4]) for name, x in batch.items()} for i in range(K))
        for micro_batch in micro_batches:
            weight = micro_batch["weight"].sum()
            for i, gradient in self.backward(micro_batch, 1 / (weight * K)):
                sums[i] += gradient * (weight * K)
        for i, total in enumerate(sums):
            self.kernels[i] = self.kernels[i] - LEARNING_RATE * (total / sum(WEIGHTS))
            self.metas[i].update()

    def backward(self, batch, factor):
        h, saved = batch["x"], []
        for i in (0, 1, 2, 2):
            meta = self.metas[i]
            x, w = meta.quantize(0, h), meta.quantize(1, self.kernels[i])
            saved.append((i, x, w))
            h = product(x, w)
        gradient = (batch["c"] * factor).bfloat16().float()
        by_kernel = {}
        for i, (x, of_x), (w, of_w) in reversed(saved):
            dy = self.metas[i].quantize(2, gradient)
            by_kernel[i] = by_kernel.get(i, 0) + product((x.T, of_x), dy)
            gradient = product(dy, (w.T, of_w))
        return by_kernel.items()

    def check(self, state):
        scale, history = state.scales
        for i, (path, index) in enumerate((("layers", 0), ("layers", 1), ("shared", ()))):
            np.testing.assert_array_equal(scale[path][index], self.metas[i].scale)
            np.testing.assert_array_equal(history[path][index], self.metas[i].history.T)
            np.testing.assert_array_equal(state.params[path][index], self.kernels[i])


@pytest.mark.parametrize(
    "settings", [{"history": 5}, {"history": 3, "algorithm": "most_recent", "margin": 2}], ids=["max", "most_recent"]
)
def test_scales_histories_and_parameters_equal_the_formulas_of_transformer_engine_to_the_bit(settings):
    precision = policy(**settings)
    step = jt.train_step(loss_fn, optax.sgd(LEARNING_RATE), precision=precision, accumulate=K)
    state, reference = step.init(parameters()), Reference(precision.fp8)
    scales = []
    for batch in batches(24):
        state, _ = step(state, batch)
        reference.step(batch)
        reference.check(state)
        scales.append(np.asarray(state.scales.scale["layers"][0]))
    scales = np.array(scales)
    assert (scales[:2, 2] == 1).all()  # no gradients so far
    assert scales[12, 0] <= 2**-8 * scales[11, 0]  # the overflow
    assert scales[-1, 0] >= 2**8 * scales[12, 0]  # which has left the history


SHORT = Fp8("delayed", history=3)


@functools.cache
def short_step(accumulate=K, **options):
    precision = jt.Policy(np.float32, jnp.bfloat16, fp8=SHORT)
    return jt.train_step(loss_fn, optax.sgd(LEARNING_RATE), precision=precision, accumulate=accumulate, **options)


@functools.cache
def after(updates):
    """Return the state after some updates."""
    step = short_step()
    state = step.init(parameters())
    for batch in batches(updates):
        state, _ = step(state, batch)
    return state


def assert_same(state, expected):
    for name in ("scales", "params"):
        for x, y in zip(*(jax.tree.leaves(getattr(s, name)) for s in (state, expected)), strict=True):
            np.testing.assert_array_equal(x, y)


def micro_batches(updates):
    for batch in batches(updates):
        for i in range(K):
            yield {name: x[i * 4 : i * 4 + 4] for name, x in batch.items()}


def test_streamed_windows_have_the_scales_of_whole_ones_and_resume_within_a_window(tmp_path):
    step = short_step()
    state = like = step.init(parameters(), streaming=True)
    for i, micro_batch in enumerate(micro_batches(4)):
        if i == 10:  # within the last window
            with contextlib.closing(StateFiles()) as files:
                files.save(Path(tmp_path) / "10" / "state", state)
                files.wait()
                state = files.read(Path(tmp_path) / "10" / "state", like)
            assert float(state.window.observed.products["shared"][0]) > 0
        state, _ = step.micro(state, micro_batch)
    assert_same(state, after(4))


def test_a_checkpoint_from_before_a_field_was_added_is_restored(tmp_path):
    step = jt.train_step(loss_fn, optax.sgd(1.0), accumulate=K)
    state = step.init(parameters(), streaming=True)
    fields = collections.namedtuple("TrainState", TrainState._fields[:9])
    window = collections.namedtuple("Window", state.window._fields[:3])(*state.window[:3])
    with contextlib.closing(StateFiles()) as files:
        files.save(Path(tmp_path) / "0" / "state", fields(*state[:9])._replace(window=window))
        files.wait()
        restored = files.read(Path(tmp_path) / "0" / "state", state)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        delayed = short_step().init(parameters(), streaming=True)
        with pytest.raises(jt.UserError, match=r"has nothing at scales/.* where this recipe's state has float32"):
            files.read(Path(tmp_path) / "0" / "state", delayed)


@pytest.mark.parametrize("options", [{"remat": "full"}, {"remat": "dots"}, {"unroll": True}, {"ema": 0.5}])
def test_scales_do_not_depend_on_how_the_program_is_computed(options):
    step = short_step(**options)
    state = step.init(parameters())
    for batch in batches(4):
        state, _ = step(state, batch)
    assert_same(state, after(4))


def test_separate_and_repeated_kernels_have_the_scales_of_stacked_and_written_out_ones():
    def written_out(params, batch, rng):
        h = batch["x"]
        for kernel in params["layers"]:
            h = h @ kernel
        y, _ = jax.lax.scan(lambda h, _: (h @ params["shared"], None), h, None, length=2)
        return jt.Loss((y * batch["c"]).sum(), batch["weight"].sum()), {}

    precision = jt.Policy(np.float32, jnp.bfloat16, fp8=SHORT)
    step = jt.train_step(written_out, optax.sgd(LEARNING_RATE), precision=precision, accumulate=K)
    params = parameters()
    state, expected = step.init({**params, "layers": [*params["layers"]]}), after(4)
    for batch in batches(4):
        state, _ = step(state, batch)
    for i in range(2):
        np.testing.assert_array_equal(state.scales.scale["layers"][i], expected.scales.scale["layers"][i])
        np.testing.assert_array_equal(state.params["layers"][i], expected.params["layers"][i])
    for x, y in zip(state.scales, expected.scales, strict=True):
        np.testing.assert_array_equal(x["shared"], y["shared"])


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "fsdp=4", "dcn=2,data=2"])
@pytest.mark.parametrize(("sums", "platform"), [("whole", "gpu"), ("whole", "cpu"), ("sharded", "cpu")])
def test_scales_on_a_mesh_are_those_of_one_device(mesh, sums, platform):
    """The largest numbers are in one row of the first or last micro-batch; a GPU's loop leaves out the last one."""
    one, many = short_step(), shard(short_step(gradient_sums=sums), make_mesh(mesh))
    choose_program(many, platform)
    expected, state = one.init(parameters()), many.init(parameters())
    for i, batch in enumerate(batches(4)):
        if i < 2:  # without gradients
            continue
        of_micro_batch = np.float32([1, 0.5, 0.5] if i == 2 else [0.5, 0.5, 1])
        factors = np.outer(of_micro_batch, np.float32([1, 2, 4, 8])).reshape(-1, 1)
        batch = {**batch, "x": batch["x"] * factors, "c": batch["c"] * factors}
        (expected, _), (state, _) = one(expected, batch), many(state, batch)
        for x, y in zip(*(jax.tree.leaves(s.scales) for s in (state, expected)), strict=True):
            # Afterwards the kernels differ: their gradients are rounded to bfloat16 by group of rows.
            np.testing.assert_allclose(x, y, rtol=0 if i == 2 else 1e-4)


def test_a_skipped_update_records_finite_magnitudes_and_an_inf_does_not_change_a_scale():
    step = short_step(1, loss_scale=jt.static_loss_scale(1.0))
    state = step.init(parameters())
    batch = next(iter(micro_batches(3)))
    state, _ = step(state, batch)
    before = jax.tree.map(np.asarray, state.scales.scale)
    params = jax.tree.map(np.asarray, state.params)
    spoiled = {**batch, "x": np.where(np.arange(16) == 3, np.float32(np.inf), 2 * batch["x"])}
    state, metrics = step(state, spoiled)
    assert bool(metrics["skipped"])
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    jax.tree.map(np.testing.assert_array_equal, state.scales.scale, before)
    # The kernels' are finite, those of all rows are not.
    assert (np.asarray(state.scales.amax_history["layers"][:, :, -1]) > 0).tolist() == [[False, True, False]] * 2
    state, metrics = step(state, batch)
    assert not bool(metrics["skipped"])
    never = step.init(parameters())
    for _ in range(2):
        never, _ = step(never, batch)
    jax.tree.map(np.testing.assert_array_equal, state.scales.scale, never.scales.scale)


def test_a_state_of_another_step_is_refused():
    state, delayed = after(1), short_step()
    current = jt.train_step(loss_fn, optax.sgd(1.0), precision="fp8", accumulate=K)
    batch = next(iter(batches(1)))
    with pytest.raises(jt.UserError, match=r"has scales of products in 8 bits, .* use state\._replace\(scales=None\)"):
        current(state, batch)
    with pytest.raises(jt.UserError, match=r"has no scales of products in 8 bits, .* create it with this step's init"):
        delayed(current.init(parameters()), batch)
    longer = jt.train_step(loss_fn, optax.sgd(1.0), precision=policy(history=4), accumulate=K)
    with pytest.raises(jt.UserError, match="has other scales of products in 8 bits"):
        longer(state, batch)


def test_without_a_state_operands_are_scaled_by_their_own_magnitudes():
    *_, batch = micro_batches(3)
    losses = [
        jt.eval_step(loss_fn, precision=precision)(after(1), batch)["loss"].total for precision in (policy(), "fp8")
    ]
    assert losses[0] == losses[1] != 0


def test_a_pipeline_refuses_delayed_scaling():
    rules = {"layers": PartitionSpec("pipeline"), ".*": PartitionSpec()}
    with pytest.raises(jt.UserError, match=r"delayed scaling of fp8 is not supported in a pipeline: .*precision='fp8'"):
        shard(short_step(), make_mesh("pipeline=2,data=2"), rules)


def test_the_memory_of_the_state_counts_histories():
    state = short_step().shapes(parameters())
    parts = {part.name: part.bytes for part in state_parts(state, lambda path: False)}
    assert parts["scales of 8-bit products"] == 3 * 3 * (1 + SHORT.history) * 4  # three kernels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"history": 0}, "history must be an integer of at least 1, got 0"),
        ({"algorithm": "mean"}, "algorithm 'mean' is unknown: choose one of max, most_recent"),
        ({"margin": -1}, "margin must be an integer in .*, got -1"),
        ({"scaling": "row", "history": 8}, "options of scaling 'delayed', got 'row'"),
        ({"power_of_two_scales": True}, "'delayed' has no power_of_two_scales"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(jt.UserError, match=message):
        Fp8(**{"scaling": "delayed", **settings})
