"""A training step on a mesh computes the same numbers as on one device."""

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.cpu.threads import reserve_collective_threads
from jaxtrain.distributed import AXES, make_mesh, shard
from jaxtrain.models import Llama, LlamaConfig, functional, llama
from tests.distributed.deep import LAYERS, POSITIONS, ROWS, TOKENS, VOCABULARY, WIDTH, deep
from tests.distributed.programs import RUNS, SEQUENCES, distance, train

NEAR = 1e-10
"""Bound of the distance of parameters after 20 steps in float64."""
PAIRS = [
    *("dcn=8", "data=8", "fsdp=8 platform=gpu", "sequence=8 accumulate=4", "tensor=8 accumulate=4"),
    *("dcn=2,data=4", "dcn=2,fsdp=4", "dcn=2,sequence=4 accumulate=4", "dcn=2,tensor=4 accumulate=4"),
    *("data=2,fsdp=4", "data=2,sequence=4 accumulate=4", "data=4,tensor=2 accumulate=4"),
    *("fsdp=4,sequence=2 accumulate=4", "fsdp=2,tensor=4 reshard_after=window", "sequence=4,tensor=2 accumulate=4"),
    *(
        "dcn=2,data=4 accumulate=1",
        "data=2,fsdp=4 accumulate=1",
        "dcn=4,fsdp=2 gradient_sums=sharded reshard_after=window",
    ),
]
"""Every axis and every pair of axes on eight devices, as `on_every_mesh` takes them.

The program for GPUs adds the sums of a window on fsdp within the last backward pass.
"""
MESHES = [
    *("dcn=8", "data=8", "fsdp=8 platform=gpu", "sequence=8 accumulate=4", "tensor=8 accumulate=4"),
    "dcn=2,data=2,fsdp=2 gradient_sums=sharded reshard_after=window",
    "dcn=2,sequence=2,tensor=2 accumulate=4",
    "data=2,sequence=2,tensor=2 accumulate=1",
    "fsdp=2,sequence=2,tensor=2 accumulate=4",
]
"""Every axis, and every pair of axes among three."""
WITHOUT_LLVM = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags that halve the time of compilation, and change neither how a program is divided nor its collectives."""


def run_with_devices(devices, *arguments, double=False, more_flags=""):
    """Run Python in a process with this number of devices; return its output."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"]) + more_flags
    # Devices that share few cores wait long for each other.
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_X64": str(int(double))}
    reserve_collective_threads(environment)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_same_training(name, mesh):
    """Check that twenty steps on a mesh equal those of one device; return the state."""
    run = RUNS[name]()
    alone, expected = train(run)
    state, metrics = train(run, make_mesh(mesh))
    assert distance(alone.params, state.params) < NEAR
    assert distance(alone.opt_state, state.opt_state) < NEAR
    np.testing.assert_allclose(*([m["grad_norm"] for m in each] for each in (expected, metrics)), rtol=1e-11)
    return state


def test_twenty_steps_equal_those_of_one_device(double):
    state = assert_same_training("small", "fsdp=2,tensor=2")
    for kernel in (x["fc"] for x in (state.params, state.opt_state[0].mu)):
        assert kernel.addressable_shards[0].data.size * 4 == kernel.size


def test_every_axis_and_every_pair_of_axes_is_compared_with_one_device():
    elsewhere = {"pipeline", "expert"}
    axes = [axis for axis in AXES if axis not in elsewhere]
    wanted = {frozenset(some) for n in (1, 2) for some in combinations(axes, n)}
    assert wanted <= {frozenset(re.findall("([a-z]+)=", spec.split()[0])) for spec in PAIRS}
    together = [re.findall("([a-z]+)=", spec.split()[0]) for spec in MESHES]
    assert wanted == {frozenset(some) for of in together for n in {1, min(2, len(of))} for some in combinations(of, n)}


WITH_FEW_THREADS = ["fsdp=4,sequence=2"]
"""The mesh whose program hangs with a thread for each device."""
EXPERT_MESHES = [
    *("data=2,expert=4", "expert=4,tensor=2", "expert=4,sequence=2", "data=2,fsdp=2,expert=2"),
    *("fsdp=4,expert=2 gradient_sums=sharded", "fsdp=2,expert=2,sequence=2"),
]
THREE_AXES = ["fsdp=2,sequence=2,tensor=2"]
CONVOLUTIONS = ["dcn=2,data=2,fsdp=2", "fsdp=4,tensor=2 reshard_after=window"]


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("small", MESHES),
        pytest.param("small", PAIRS, marks=pytest.mark.nightly),
        ("cnn", CONVOLUTIONS),
        pytest.param("gpt2", THREE_AXES, marks=pytest.mark.nightly),
        ("mixtral", EXPERT_MESHES[-1:]),
        pytest.param("mixtral", WITH_FEW_THREADS + EXPERT_MESHES[:-1], marks=pytest.mark.nightly),
        *(
            pytest.param(
                name,
                [spec for spec in PAIRS if name in (*SEQUENCES, "mixtral") or "sequence" not in spec],
                marks=pytest.mark.nightly,
            )
            for name in RUNS
            if name != "small"
        ),
    ],
)
def test_twenty_steps_on_every_mesh_of_eight_devices_equal_those_of_one(name, specs):
    program = "-m", "tests.distributed.on_every_mesh", name, *specs
    distances = json.loads(run_with_devices(8, *program, double=True, more_flags=WITHOUT_LLVM))
    assert distances.keys() == {*specs}
    assert {spec: d for spec, d in distances.items() if not d < NEAR} == {}


def test_an_overflow_on_one_device_skips_the_update_on_all():
    run = RUNS["mlp"]()
    plain = run.batch
    calls = iter(range(100))

    def with_overflows(rng):
        batch = plain(rng)
        if next(calls) % 12 in (3, 4, 9):
            batch["image"][5] = 1e30  # in the first micro-batch, among the rows of the second device
        return batch

    options = {"precision": "fp16", "loss_scale": jt.dynamic_loss_scale(init_scale=2.0**10, growth_interval=2)}
    run = run.__class__(run.loss_fn, run.make, with_overflows, run.rules)
    alone, expected = train(run, steps=12, **options)
    state, metrics = train(run, make_mesh("data=2,fsdp=2"), steps=12, **options)
    for name in ("loss_scale", "skipped", "applied", "nonfinite_micro_batch", "nonfinite_leaf"):
        assert [m[name] for m in metrics] == [m[name] for m in expected]
    assert state.loss_scale == alone.loss_scale
    assert [i for i, m in enumerate(expected) if m["skipped"]] == [3, 4, 9]
    assert {float(m["loss_scale"]) for m in expected} == {512, 1024, 2048}


def test_streaming_and_a_short_window_equal_one_device(double):
    run, mesh = RUNS["mlp"](), make_mesh("data=2,fsdp=2")
    step = jt.train_step(run.loss_fn, optax.adam(1e-2), accumulate=2, precision="fp64", ema=0.9)
    states = []
    for one in (step, shard(step, mesh, run.rules)):
        rng = np.random.default_rng(0)
        state = one.init(jax.device_get(run.make()[0]), streaming=True)
        for _ in range(3):
            state, metrics = one.micro(state, run.batch(rng))
        state, metrics = one.flush(state)
        assert metrics["updated"]
        assert metrics["applied"] == 2
        states.append(state)
    assert distance(*(s.params for s in states)) < NEAR
    assert distance(*(s.ema for s in states)) < NEAR


def test_init_does_not_donate_the_params():
    run, mesh = RUNS["mlp"](), make_mesh("fsdp=4")
    step = shard(jt.train_step(run.loss_fn, optax.adam(1e-2), accumulate=2), mesh, run.rules)
    params = step.init(lambda: run.make()[0]).params
    kernel = params["layers"][0]["kernel"]
    assert {s.data.shape for s in kernel.addressable_shards} == {(4, 32)}
    state = step.init(params)
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert state.params["layers"][0]["kernel"].is_deleted()
    assert not kernel.is_deleted()


def gathered_shapes(text):
    """Return the result shapes of the all-gathers of a compiled program, except those of token ids."""
    lines = re.findall(r"= (.+?) all-gather(?:-start)?\(", text)
    return [tuple(map(int, dims.split(","))) for line in lines for dims in re.findall(r"\bb?f\d+\[([\d,]+)\]", line)]


def compiled(spec, **options):
    step, make = deep(spec, **options)
    return step.compile(step.shapes(make), TOKENS)


@pytest.fixture(scope="module")
def on_four():
    return compiled("fsdp=4")


def test_weights_are_gathered_a_layer_at_a_time(on_four):
    assert_gathered_by_layer(on_four)


def test_weights_for_recomputation_are_gathered_a_layer_at_a_time():
    assert_gathered_by_layer(compiled("fsdp=4", remat="full"))


def assert_gathered_by_layer(program):
    shapes = gathered_shapes(program.as_text())
    assert shapes.count((WIDTH, 4 * WIDTH)) + shapes.count((4 * WIDTH, WIDTH)) >= 4  # fc's and mlp_proj's, twice
    assert [shape for shape in shapes if LAYERS in shape] == []
    assert [shape for shape in shapes if ROWS in shape] == []  # no activation is gathered
    assert sum(VOCABULARY in shape for shape in shapes) == 1  # the table, for the head, and not for the lookup


def test_weights_with_the_size_of_a_batch_are_not_sharded_as_rows():
    step, make = deep("tensor=4")
    batch = {"tokens": np.zeros((2 * WIDTH, POSITIONS), np.int32)}
    shapes = gathered_shapes(step.compile(step.shapes(make), batch).as_text())
    assert [shape for shape in shapes if shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))] == []


def test_memory_of_the_state_decreases_with_the_number_of_devices(on_four):
    step, make = deep("fsdp=1")
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.shapes(make)))
    assert whole > 12 * LAYERS * 12 * WIDTH**2
    # Except for the batch, the counters and the key, of which every device has a part or a copy.
    assert abs(on_four.memory_analysis().argument_size_in_bytes * 4 - whole) < 1024


def test_memory_of_the_state_on_eight_devices_is_an_eighth():
    program = "-m", "tests.planning.memory_on_every_size", "1", "8"
    done = run_with_devices(8, *program, more_flags=WITHOUT_LLVM)
    memory = {int(n): bytes_of for n, bytes_of in json.loads(done).items()}
    for n, (arguments, temporaries) in memory.items():
        assert abs(arguments * n - memory[1][0]) < 2048, memory
        assert temporaries * n < 2 * memory[1][1], memory


@pytest.mark.nightly
def test_windows_divide_the_lookup_of_a_table_in_16_bits():
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8,
    )
    apply, params = functional(Llama(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (16, 9), 0, 512)

    def loss_fn(params, batch, rng):
        return jt.Predictions(apply(params, batch[:, :-1]), batch[:, 1:], jnp.ones((len(batch), 8))).loss(), {}

    def last_metrics(mesh):
        step = jt.train_step(loss_fn, optax.sgd(0.5), accumulate=2, precision="bf16_compute")
        step = step if mesh is None else shard(step, make_mesh(mesh, jax.devices()[:4]), llama.SHARDING)
        state = step.init(jax.tree.map(jnp.copy, params))
        for _ in range(3):
            state, metrics = step(state, tokens)
        return float(metrics["loss"]), float(metrics["grad_norm"])

    assert last_metrics("data=2,fsdp=2") == pytest.approx(last_metrics(None), rel=1e-3)
