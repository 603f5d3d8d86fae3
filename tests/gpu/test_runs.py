"""Runs on a GPU: the same bits on repetition and after a resume, and the memory that was predicted."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import memory_per_device
from jaxtrain.models import GPT2Config
from tests.gpu.language_model import language_model, tokens

# GPU libraries warn about their versions and about buffers that cannot be donated.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
STEPS = 6


def bits(tree):
    leaves = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in tree]
    return [np.asarray(x).tobytes() for x in leaves]


def trained(steps, state=None, *, accumulate=1):
    """Train with a step of its own, from the start or from a state in host memory."""
    create, loss_fn = language_model()
    step = jt.train_step(
        loss_fn, optax.adamw(1e-3), precision="bf16", accumulate=accumulate, clip_norm=1.0, deterministic=True
    )
    state = step.init(create) if state is None else jax.device_put(state)
    for i in steps:
        state, _ = step(state, tokens(8, seed=i))
    return jax.device_get(state._replace(rng=jax.random.key_data(state.rng)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_deterministic_step_computes_the_same_bits_when_it_is_compiled_again(accumulate, uncached):
    first = trained(range(STEPS), accumulate=accumulate)
    uncached()
    assert bits(jax.tree.leaves(trained(range(STEPS), accumulate=accumulate))) == bits(jax.tree.leaves(first))
    half = trained(range(STEPS // 2), accumulate=accumulate)
    uncached()
    half = half._replace(rng=jax.random.wrap_key_data(half.rng))
    rest = trained(range(STEPS // 2, STEPS), half, accumulate=accumulate)
    assert bits(jax.tree.leaves(rest)) == bits(jax.tree.leaves(first))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, uncached):
    for package in ("grain", "orbax.checkpoint", "rich", "tensorboardX"):
        pytest.importorskip(package, reason="a run needs jaxtrain[run]")

    @dataclass(frozen=True, kw_only=True)
    class Tokens(jt.Recipe):
        steps: int = STEPS
        batch_size: int = 8
        precision: str = "bf16"
        deterministic: bool = True
        schedule: str = "constant"  # so that a run of three steps is the beginning of one of six
        warmup_steps: int = 0

        def task(self):
            create, loss_fn = language_model()
            return jt.Task(init=create, loss_fn=loss_fn, train=tokens(64))

    whole = jt.fit(Tokens(), tmp_path / "whole", quiet=True)
    jt.fit(Tokens(steps=STEPS // 2), tmp_path / "parts", quiet=True)
    uncached()
    parts = jt.fit(Tokens(), tmp_path / "parts", resume=True, quiet=True)
    assert bits(jax.tree.leaves(parts.state)) == bits(jax.tree.leaves(whole.state))


LARGE = GPT2Config(vocab_size=32768, n_positions=512, n_embd=1024, n_layer=6, n_head=16)


def test_a_step_needs_the_memory_that_was_predicted(gpu):
    create, loss_fn = language_model(LARGE)
    step = jt.train_step(loss_fn, optax.adamw(1e-3), precision="bf16", clip_norm=1.0)
    batch = tokens(16, LARGE)
    predicted = sum(memory_per_device(step, create, batch))
    before = gpu.memory_stats()
    if before is None:
        pytest.skip(f"{gpu.device_kind} reports no memory statistics")
    assert before["peak_bytes_in_use"] < predicted / 2, "run it before tests that need more memory"
    state = step.init(create)
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    # Besides the program, there are its constants and what is left of other tests; allocations are rounded up.
    assert 0.75 * predicted < gpu.memory_stats()["peak_bytes_in_use"] < 1.1 * predicted + before["bytes_in_use"]
