"""A training step on a mesh is the training step of one device."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from tests.distributed.deep import LAYERS, POSITIONS, ROWS, TOKENS, WIDTH, deep
from tests.distributed.programs import RUNS, SEQUENCES, distance, train

NEAR = 1e-10
"""Of parameters after 20 steps in double."""
FACTORISATIONS = [
    *("data=8", "fsdp=8", "tensor=8", "data=4,fsdp=2", "data=4,tensor=2", "data=2,fsdp=4", "data=2,tensor=4"),
    *("fsdp=4,tensor=2", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"),
]
OF_SEQUENCES = ["data=2,sequence=4", "sequence=8", "fsdp=2,sequence=2,tensor=2"]


def in_a_process_of(devices, *arguments, double=False):
    """What Python prints that has so many."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    # Devices that share few cores wait for each other.
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_X64": str(int(double))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def trained_alike(name, mesh):
    """The state after twenty steps on a mesh, which is that of one device."""
    run = RUNS[name]()
    alone, told = train(run)
    state, metrics = train(run, make_mesh(mesh))
    assert distance(alone.params, state.params) < NEAR
    assert distance(alone.opt_state, state.opt_state) < NEAR
    np.testing.assert_allclose(*([m["grad_norm"] for m in each] for each in (told, metrics)), rtol=1e-11)
    return state


def test_twenty_steps_are_those_of_one_device(double):
    state = trained_alike("gpt2", "fsdp=2,tensor=2")
    for kernel in (x["blocks"]["fc"]["kernel"] for x in (state.params, state.opt_state[0].mu)):
        assert kernel.addressable_shards[0].data.size * 4 == kernel.size


SOON = {"gpt2", "cnn"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SOON else pytest.mark.nightly) for name in RUNS]
)
def test_twenty_steps_on_every_mesh_of_eight_devices_are_those_of_one(name):
    specs = FACTORISATIONS + (OF_SEQUENCES if name in SEQUENCES else [])
    done = in_a_process_of(8, "-m", "tests.distributed.on_every_mesh", name, *specs, double=True)
    distances = json.loads(done)
    assert distances.keys() == {*specs}
    assert {spec: d for spec, d in distances.items() if not d < NEAR} == {}


def test_an_overflow_on_one_device_skips_the_update_on_all():
    run = RUNS["mlp"]()
    plain = run.batch
    calls = iter(range(100))

    def batch(rng):
        made = plain(rng)
        if next(calls) % 12 in (3, 4, 9):
            made["image"][5] = 1e30  # of the first micro-batch, and of the second device's rows
        return made

    options = {"precision": "fp16", "loss_scale": jt.dynamic_loss_scale(init_scale=2.0**10, growth_interval=2)}
    run = run.__class__(run.loss_fn, run.make, batch, run.rules)
    alone, told = train(run, steps=12, **options)
    state, metrics = train(run, make_mesh("data=2,fsdp=2"), steps=12, **options)
    for name in ("loss_scale", "skipped", "applied", "nonfinite_micro_batch", "nonfinite_leaf"):
        assert [m[name] for m in metrics] == [m[name] for m in told]
    assert state.loss_scale == alone.loss_scale
    assert [i for i, m in enumerate(told) if m["skipped"]] == [3, 4, 9]
    assert {float(m["loss_scale"]) for m in told} == {512, 1024, 2048}


@pytest.mark.slow
def test_micro_batches_one_by_one_and_a_short_window_are_those_of_one_device(double):
    run, mesh = RUNS["mlp"](), make_mesh("data=2,fsdp=2")
    step = jt.train_step(run.loss_fn, optax.adam(1e-2), accumulate=2, precision="fp64", ema=0.9)
    states = []
    for one in (step, shard(step, mesh, run.rules)):
        rng = np.random.default_rng(0)
        state = one.init(jax.device_get(run.make()[0]), streaming=True)
        for _ in range(3):
            state, told = one.micro(state, run.batch(rng))
        state, told = one.flush(state)
        assert told["updated"]
        assert told["applied"] == 2
        states.append(state)
    assert distance(*(s.params for s in states)) < NEAR
    assert distance(*(s.ema for s in states)) < NEAR


def test_what_a_state_is_made_from_stays_the_callers():
    run, mesh = RUNS["mlp"](), make_mesh("fsdp=4")
    step = shard(jt.train_step(run.loss_fn, optax.adam(1e-2), accumulate=2), mesh, run.rules)
    params = step.init(lambda: run.make()[0]).params
    kernel = params["layers"][0]["kernel"]
    assert {s.data.shape for s in kernel.addressable_shards} == {(4, 32)}
    state = step.init(params)
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert state.params["layers"][0]["kernel"].is_deleted()
    assert not kernel.is_deleted()


def gathered(text):
    """The shapes that all-gathers in a compiled program make."""
    lines = re.findall(r"= (.+?) all-gather(?:-start)?\(", text)
    return [tuple(map(int, dims.split(","))) for line in lines for dims in re.findall(r"\w+\[([\d,]+)\]", line)]


def compiled(spec, **options):
    step, make = deep(spec, **options)
    return step.compile(step.shapes(make), TOKENS)


@pytest.fixture(scope="module")
def on_four():
    return compiled("fsdp=4")


def test_weights_are_gathered_a_layer_at_a_time(on_four):
    assert_gathered_by_layer(on_four)


@pytest.mark.slow
def test_weights_that_are_recomputed_with_are_gathered_a_layer_at_a_time():
    assert_gathered_by_layer(compiled("fsdp=4", remat="full"))


def assert_gathered_by_layer(program):
    shapes = gathered(program.as_text())
    assert shapes.count((WIDTH, 4 * WIDTH)) + shapes.count((4 * WIDTH, WIDTH)) >= 4  # fc's and mlp_proj's, twice
    assert [shape for shape in shapes if LAYERS in shape] == []
    assert [shape for shape in shapes if ROWS in shape] == []  # no activation is: rows stay where they are


@pytest.mark.slow
def test_weights_with_as_many_rows_as_a_batch_are_not_taken_for_rows():
    step, make = deep("tensor=4")
    batch = {"tokens": np.zeros((2 * WIDTH, POSITIONS), np.int32)}
    shapes = gathered(step.compile(step.shapes(make), batch).as_text())
    assert [shape for shape in shapes if shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))] == []


def test_memory_for_the_state_falls_as_the_devices_grow(on_four):
    step, make = deep("fsdp=1")
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.shapes(make)))
    assert whole > 12 * LAYERS * 12 * WIDTH**2
    # But for the batch, the counters and the key, of which every device has some.
    assert abs(on_four.memory_analysis().argument_size_in_bytes * 4 - whole) < 1024


@pytest.mark.slow
def test_memory_for_the_state_falls_to_an_eighth():
    done = in_a_process_of(8, "-m", "tests.planning.memory_on_every_size", "1", "2", "4", "8")
    memory = {int(n): bytes_of for n, bytes_of in json.loads(done).items()}
    for n, (arguments, temporaries) in memory.items():
        assert abs(arguments * n - memory[1][0]) < 2048, memory
        assert temporaries * n < 2 * memory[1][1], memory
