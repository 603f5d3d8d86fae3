"""The options that the programs of a step are compiled with, and the same numbers on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.step.compiler_options import compiler_options

OPTIONS = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def loss_fn(params, batch, rng):
    return jt.Loss.of((batch["x"] @ params - 1) ** 2), {}


BATCH = {"x": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}


@pytest.fixture
def compiled_with(monkeypatch):
    """The compiler options of every function that is jitted with a `compiler_options`."""
    seen = []
    jit = jax.jit

    def recording(*args, **kwargs):
        if "compiler_options" in kwargs:
            seen.append(kwargs["compiler_options"])
        return jit(*args, **kwargs)

    monkeypatch.setattr(jax, "jit", recording)
    return seen


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_program_of_a_deterministic_step_excludes_nondeterministic_kernels(deterministic, compiled_with):
    step = jt.train_step(loss_fn, optax.sgd(0.1), deterministic=deterministic)
    evaluate = jt.eval_step(loss_fn, deterministic=deterministic)
    sharded = shard(step, make_mesh("data=2", jax.devices()[:2]))
    one, _ = step(step.init(jnp.ones(8)), BATCH)
    two, _ = sharded(sharded.init(jnp.ones(8)), BATCH)
    assert np.isfinite(float(evaluate(one, BATCH)["loss"].total))
    np.testing.assert_allclose(one.params, two.params, rtol=1e-6)
    # The step, its micro-batches and its flush; the evaluation; those of the mesh that were called.
    assert compiled_with == [OPTIONS if deterministic else None] * 5


def test_the_options_are_not_shared():
    given = compiler_options(deterministic=True)
    given["xla_gpu_autotune_level"] = 4
    assert compiler_options(deterministic=True) == OPTIONS


def test_only_programs_for_several_gpus_get_the_options_of_meshes():
    assert compiler_options(deterministic=False, platform="gpu") is None
    assert compiler_options(deterministic=False, platform="cpu", devices=8) is None
    on_mesh = compiler_options(deterministic=True, platform="gpu", devices=8)
    assert OPTIONS.items() < on_mesh.items()
    # A backend rejects an option that its version does not know.
    jax.jit(jnp.sin, compiler_options=on_mesh)(1.0)
