"""The mesh axis pipeline: its schedule, and the same numbers as on one device."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.errors import UserError
from jaxtrain.labs.pipeline import Schedule
from tests.distributed.programs import PIPELINED, ROWS, RUNS, train
from tests.distributed.test_sharding_step import NEAR, run_with_devices


@pytest.mark.parametrize(("p", "chunks", "m"), [(4, 1, 16), (4, 1, 2), (4, 2, 16), (2, 3, 4), (3, 2, 3)])
def test_every_unit_runs_once_after_what_it_needs(p, chunks, m):
    schedule, forward, backward = Schedule(p, chunks, m), {}, {}
    for tick in range(schedule.ticks):
        for of, unit_of in ((forward, schedule.forward), (backward, schedule.backward)):
            for stage in range(p):
                unit = unit_of(np.int32(tick), np.int32(stage))
                if unit.valid:
                    key = int(unit.chunk) * p + stage, int(unit.micro_batch)
                    assert of.setdefault(key, tick) == tick
                    if of is backward:
                        assert forward[key] == schedule.forward_tick(unit, stage)
                        assert tick - forward[key] < schedule.slots
    last = chunks * p - 1
    assert forward.keys() == backward.keys() == {(v, i) for v in range(chunks * p) for i in range(m)}
    assert all(forward[v, i] == forward[v - 1, i] + 1 for v, i in forward if v)
    assert all(backward[v, i] == backward[v + 1, i] + 1 for v, i in backward if v < last)
    assert all(backward[last, i] == forward[last, i] for i in range(m))
    # Forward runs in all ticks but the last ones, backward in all but the first: as many, of which p − 1 are idle.
    assert max(forward.values()) == min(forward.values()) + m * chunks + p - 2
    assert max(backward.values()) - min(backward.values()) == m * chunks + p - 2
    assert min(backward.values()) == schedule.delay
    assert schedule.bubble == (p - 1) / (m * chunks + p - 1)


def test_what_a_pipeline_cannot_run_is_refused():
    run, mesh = RUNS["mlp"](), make_mesh("pipeline=4")

    def refused(message, rules=run.rules, **options):
        with pytest.raises(UserError, match=message):
            shard(jt.train_step(run.loss_fn, optax.sgd(0.1), **options), mesh, rules)

    refused("mesh axis pipeline=4 divides no layers without sharding rules", rules=None)
    refused("accumulate is a schedule", accumulate=lambda _: 2)
    refused("use reshard_after='forward'", reshard_after="window")
    refused("unroll removes the loop over layers", unroll=True)
    refused(r"hooks \['x'\] are not applied in a pipeline", hooks={"x": lambda g: g})
    with pytest.raises(UserError, match="pipeline_chunks must be an integer of at least 1, got 0"):
        jt.train_step(run.loss_fn, optax.sgd(0.1), pipeline_chunks=0)
    step = shard(jt.train_step(run.loss_fn, optax.sgd(0.1)), mesh, run.rules)
    with pytest.raises(UserError, match=r"step\.micro cannot fill a pipeline"):
        step.micro(None, {})
    params, batch = jax.eval_shape(run.make)[0], run.batch(np.random.default_rng(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.complex64), params)
    with pytest.raises(UserError, match="is complex, which the mesh axis pipeline does not support: use data or fsdp"):
        step.jitted.lower(step.shapes(params), step.place(batch))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {}, "this loss_fn has no scan over stacked layers"),
        ("t5", {}, "this loss_fn has 2 scans over stacked layers"),
        ("cnn", {}, "does not support model state"),
        ("gpt2", {}, "2 layers are not divisible by the 4 stages of pipeline=4"),
        ("gpt2", {"accumulate": 2, "pipeline_chunks": 2}, "accumulate 2 is not divisible by pipeline=4"),
    ],
)
def test_models_that_a_pipeline_cannot_divide_are_refused(name, options, message):
    run = RUNS[name]()
    step = shard(jt.train_step(run.loss_fn, optax.sgd(0.1), **options), make_mesh("pipeline=4"), run.rules)
    params, model_state = jax.eval_shape(run.make)
    batch = run.batch(np.random.default_rng(0))
    with pytest.raises(UserError, match=message):
        step.jitted.lower(step.shapes(params, model_state=model_state), step.place(batch))


def test_an_update_of_layers_that_pass_on_integers_equals_that_of_one_device():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 3, 3)), "head": rng.normal(size=(3, 1))}
    batch = {"x": rng.normal(size=(8, 3))}

    def loss_fn(params, batch, rng):
        del rng
        layer = jt.block(lambda w, x, n: (jax.numpy.tanh(x @ w) * (1 + n % 2).astype(x.dtype), n + 1))
        (x, n), _ = jax.lax.scan(lambda carry, w: (layer(w, *carry), None), (batch["x"], np.int32(0)), params["w"])
        return jt.Loss.of((x @ params["head"]) ** 2 * n.astype(x.dtype)), {}

    def updated(mesh):
        step = jt.train_step(loss_fn, optax.sgd(0.1), precision="fp64", accumulate=2)
        step = step if mesh is None else shard(step, mesh, {"w": P(None, None, None), "head": P()})
        return jax.device_get(step(step.init(params), batch)[0].params)

    mesh = make_mesh("pipeline=2", jax.devices()[:2])
    with jax.enable_x64(True):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), updated(mesh), updated(None))


MESHES = [
    *("pipeline=4,data=2", "pipeline=2,data=2,tensor=2", "pipeline=2,fsdp=2,sequence=2"),
    *("dcn=2,pipeline=2,data=2 accumulate=2", "pipeline=2,fsdp=4 gradient_sums=sharded"),
    "pipeline=2,data=2,tensor=2 pipeline_chunks=2",
]
# With two micro-batches, stages divide the rows of the head; four have too few rows.
OF_TWO_LAYERS = ["pipeline=2,data=2,fsdp=2 accumulate=2", "pipeline=2,tensor=4"]


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("gpt2", ["pipeline=4,data=2 accumulate=2"]),
        pytest.param("mixtral", ["pipeline=2,data=2,expert=2 accumulate=2"], marks=pytest.mark.nightly),
        *(pytest.param(name, MESHES, marks=pytest.mark.nightly) for name in ("gpt2", "llama")),
        *(
            pytest.param(name, OF_TWO_LAYERS, marks=pytest.mark.nightly)
            for name in PIPELINED.keys() - {"gpt2", "llama"}
        ),
    ],
)
def test_twenty_steps_in_a_pipeline_equal_those_of_one_device(name, specs):
    done = run_with_devices(8, "-m", "tests.distributed.on_every_mesh", name, *specs, double=True)
    distances = json.loads(done)
    assert distances.keys() == {*specs}
    assert {spec: d for spec, d in distances.items() if not d < NEAR} == {}


@pytest.mark.nightly
def test_an_overflow_in_one_micro_batch_skips_the_update_and_is_located():
    plain, calls = RUNS["gpt2"](), iter(range(100))

    def loss_fn(params, batch, rng):
        loss, metrics = plain.loss_fn(params, {k: x for k, x in batch.items() if k != "factor"}, rng)
        return jt.Loss(loss.total * batch["factor"].max().astype(loss.total.dtype), loss.weight), metrics

    def batch(rng):
        factor = np.ones(ROWS, np.float32)
        factor[9] = 1e30 if next(calls) % 6 in (1, 4) else 1.0  # a row of the third micro-batch
        return {**plain.batch(rng), "factor": factor}

    run = dataclasses.replace(plain, loss_fn=loss_fn, batch=batch)
    options = {"precision": "fp16", "loss_scale": jt.dynamic_loss_scale(init_scale=2.0**10, growth_interval=2)}
    _, expected = train(run, steps=6, accumulate=4, **options)
    state, metrics = train(run, make_mesh("pipeline=2,data=2"), steps=6, accumulate=4, **options)
    for name in ("loss_scale", "skipped", "applied", "nonfinite_micro_batch", "nonfinite_leaf"):
        assert [m[name] for m in metrics] == [m[name] for m in expected], name
    assert [int(m["nonfinite_micro_batch"]) for m in metrics] == [-1, 2, -1, -1, 2, -1]
    assert state.params["blocks"]["fc"]["kernel"].sharding.spec[0] == "pipeline"
