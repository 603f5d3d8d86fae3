"""A pipeline of H100s: its bubble, its permutes, and memory that does not depend on the number of micro-batches."""

from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain.labs.pipeline import Schedule
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional, gpt2
from jaxtrain.optim import adamw
from jaxtrain.planning import gpu_program
from tests.gpu_programs.families import HEADS, LENGTH, VOCABULARY, WIDTH

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")

STAGES = 4


def pipelined(micro_batches, chunks=1):
    """Return the program of a GPT-2 with two layers per stage and chunk, and four rows in a micro-batch of a device."""
    config = GPT2Config(VOCABULARY, LENGTH, n_embd=WIDTH, n_layer=2 * STAGES * chunks, n_head=HEADS)
    apply, params = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))

    def loss_fn(params, batch, rng):
        losses = cross_entropy(apply(params, batch["tokens"], rng), batch["labels"])
        return jaxtrain.Loss.of(losses), {}

    options = {"precision": "bf16", "accumulate": micro_batches, "clip_norm": 1.0, "pipeline_chunks": chunks}
    step = jaxtrain.train_step(loss_fn, adamw(1e-3), **options)
    tokens = jax.ShapeDtypeStruct((2 * STAGES * micro_batches, LENGTH), np.int32)
    batch = {"tokens": tokens, "labels": tokens}
    return gpu_program(step, params, batch, mesh=f"pipeline={STAGES},data=2", rules=gpt2.SHARDING)


def assert_scheduled(compiled, micro_batches, chunks=1):
    schedule = Schedule(STAGES, chunks, micro_batches)
    assert compiled.host_waits == 0
    # Each stage sends the residual stream, float32, in every tick, and its gradient back.
    permuted = sum(t.sent for t in compiled.communication.traffic if t.kind == "collective-permute")
    closed_form = 2 * (micro_batches * chunks + STAGES - 1) * STAGES * LENGTH * WIDTH * 4
    assert 1 <= permuted / closed_form <= 1.02
    return schedule


def test_the_bubble_is_that_of_the_closed_form():
    compiled = pipelined(16)
    schedule = assert_scheduled(compiled, 16)
    flops = Counter()
    for product in compiled.products:
        flops[product.times] += product.flops * product.times
    # Two layers forward and backward in each tick, and either of them while the pipeline fills and drains; the head
    # runs 16 times, for a row per device.
    busy, idle = flops[2 * 16], flops[2 * (STAGES - 1)]
    assert flops.keys() == {2 * 16, 2 * (STAGES - 1), 16}
    assert flops[16] == 16 * 6 * LENGTH * WIDTH * VOCABULARY
    # The last stage sends its output to all stages, each of which returns a gradient.
    sent = {t.kind: t.sent for t in compiled.communication.traffic if t.times in (16, 32) and "permute" not in t.kind}
    assert sent["all-to-all"] == 16 * (STAGES - 1) * LENGTH * WIDTH * 4
    assert idle / (busy + idle) == pytest.approx(schedule.bubble, rel=0.05)


@pytest.mark.nightly
def test_memory_does_not_depend_on_the_number_of_micro_batches():
    few, many = pipelined(16), pipelined(32)
    assert many.temporary_bytes <= 1.01 * few.temporary_bytes


@pytest.mark.nightly
def test_chunks_shorten_the_bubble():
    compiled = pipelined(16, chunks=2)
    assert_scheduled(compiled, 16, chunks=2)
