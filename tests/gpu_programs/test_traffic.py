"""How often programs compiled for GPUs read and write their large arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain import autocast
from jaxtrain.cost import find_target
from jaxtrain.cost.gpu import compile_for_gpu, gpu_devices
from jaxtrain.losses import cross_entropy
from jaxtrain.models import functional
from jaxtrain.models.layer_norm import LayerNorm

pytestmark = pytest.mark.slow
ROWS, WIDTH, CLASSES = 4096, 512, 50304


pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")


def moved(fn, *shapes):
    """Return the bytes that the program of a function moves."""
    target = find_target("h100")
    sharding = SingleDeviceSharding(gpu_devices(target, 1)[0])
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    return compile_for_gpu(lambda: jax.jit(fn).lower(*arrays), target).moved_bytes


def test_cross_entropy_reads_its_logits_once_in_each_direction():
    logits = jax.ShapeDtypeStruct((ROWS, CLASSES), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((ROWS,), np.int32)

    def loss(logits, labels):
        return cross_entropy(logits.astype(np.float32), labels).sum()

    # And writes its gradient.
    assert moved(jax.grad(loss), logits, labels) < 3.2 * logits.size * 2


def test_the_backward_pass_of_a_norm_reads_its_input_twice():
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    apply, params = functional(LayerNorm(WIDTH, 1e-5))

    def gradients(params, x, cotangent):
        def residual(params, x):
            return x, autocast(apply, jnp.bfloat16)(params, x).astype(jnp.bfloat16)

        of_params, dx = jax.vjp(residual, params, x)[1]((cotangent, cotangent.astype(jnp.bfloat16)))
        return of_params, dx, dx.astype(jnp.bfloat16)

    assert moved(gradients, params, x, x) < 8 * x.size * 4
