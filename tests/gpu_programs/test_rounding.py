"""How an update of bfloat16 parameters is compiled for GPUs, by the rounding of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxtrain as jt
from jaxtrain.cost import find_target
from jaxtrain.cost.gpu import compile_for_gpu, gpu_devices
from jaxtrain.optim import adamw
from jaxtrain.step.gradient import Gradient
from jaxtrain.step.step import update

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")
PARAMS = {
    "layers": jax.ShapeDtypeStruct((3, 512, 768), jnp.bfloat16),
    "head": jax.ShapeDtypeStruct((999, 770), jnp.bfloat16),
}
SLACK = 2**15
"""Bytes of scalars, and of the norm's partial sums."""
SIZE = sum(x.size for x in PARAMS.values())


def program(how):
    """Return the program of an update by AdamW, without the gradient's."""
    precision = jt.Policy(jnp.bfloat16, param_rounding=how)
    step = jt.train_step(lambda params, batch, rng: ..., adamw(1e-3), precision=precision).for_platform("gpu")
    total = jax.ShapeDtypeStruct((), np.float32)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), PARAMS)
    gradient = Gradient(grads, jt.Loss(total, total), {}, None)
    target = find_target("h100")
    sharding = SingleDeviceSharding(gpu_devices(target, 1)[0])
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (step.shapes(PARAMS), gradient)
    )
    fn = jax.jit(lambda state, gradient: update(step.parts, state, gradient), donate_argnums=0)
    return compile_for_gpu(lambda: fn.lower(*arguments), target)


def test_roundings_take_one_pass_and_write_no_random_bits():
    nearest, stochastic, kahan = map(program, ("nearest", "stochastic", "kahan"))
    # Gradients, read once; parameters and two moments, read and written.
    assert SIZE * 16 <= nearest.moved_bytes < SIZE * 16 + SLACK
    assert abs(stochastic.moved_bytes - nearest.moved_bytes) < SLACK
    # And the compensation, read and written.
    assert abs(kahan.moved_bytes - nearest.moved_bytes - SIZE * 4) < SLACK
    assert max(x.temporary_bytes for x in (nearest, stochastic, kahan)) < SLACK
    for compiled in (nearest, stochastic, kahan):
        large = [launch for launch in compiled.launches if launch.moved > SIZE]
        assert len(large) == len(PARAMS), [launch.instruction.name for launch in large]
    # An operation that XLA does not leave out, as it does conversions there and back.
    assert kahan.hlo.count("reduce-precision(") == len(PARAMS)
    assert "exponent_bits=8, mantissa_bits=7" in kahan.hlo
