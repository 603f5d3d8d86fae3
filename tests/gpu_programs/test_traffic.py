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
from jaxtrain.models.layers.layer_norm import LayerNorm
from jaxtrain.passes import overwrite_logits, split_products

ROWS, WIDTH, CLASSES = 4096, 512, 50304


pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")


def program(fn, *shapes):
    """Return the program of a function."""
    target = find_target("h100")
    sharding = SingleDeviceSharding(gpu_devices(target, 1)[0])
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    return compile_for_gpu(lambda: jax.jit(fn).lower(*arrays), target)


def test_cross_entropy_reads_its_logits_once_in_each_direction():
    logits = jax.ShapeDtypeStruct((ROWS, CLASSES), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((ROWS,), np.int32)

    def loss(logits, labels):
        return cross_entropy(logits.astype(np.float32), labels).sum()

    # And writes its gradient.
    assert program(jax.grad(loss), logits, labels).moved_bytes < 3.2 * logits.size * 2


def test_the_backward_pass_of_a_norm_reads_its_input_twice():
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    apply, params = functional(LayerNorm(WIDTH, 1e-5))

    def gradients(params, x, cotangent):
        def residual(params, x):
            return x, autocast(apply, jnp.bfloat16)(params, x).astype(jnp.bfloat16)

        of_params, dx = jax.vjp(residual, params, x)[1]((cotangent, cotangent.astype(jnp.bfloat16)))
        return of_params, dx, dx.astype(jnp.bfloat16)

    assert program(gradients, params, x, x).moved_bytes < 8 * x.size * 4


@pytest.mark.parametrize("classes", [CLASSES, CLASSES - 47])
def test_the_gradient_of_logits_takes_their_place(classes):
    x, kernel = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((ROWS, WIDTH), (WIDTH, classes)))
    labels = jax.ShapeDtypeStruct((ROWS,), np.int32)

    def loss(x, kernel, labels):
        return cross_entropy(x @ kernel, labels).sum()

    gradients = jax.grad(overwrite_logits(autocast(loss, jnp.bfloat16), "gpu"), argnums=(0, 1))
    # The logits, and the operands and the gradient of the weight.
    size = ROWS * classes * 2
    assert program(gradients, x, kernel, labels).temporary_bytes < 1.6 * size


def test_the_parts_of_a_product_are_not_copied():
    x, kernel, bias = (
        jax.ShapeDtypeStruct(shape, np.float32) for shape in ((ROWS, WIDTH), (WIDTH, 3 * WIDTH), (3 * WIDTH,))
    )

    def parts(x, kernel, bias):
        return jnp.split(x @ kernel + bias[None], 3, axis=-1)

    def gradients(x, kernel, bias, *of_parts):
        computed, pull_back = jax.vjp(split_products(autocast(parts, jnp.bfloat16), "gpu"), x, kernel, bias)
        return computed, pull_back(list(of_parts))

    of_part = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    # In arrays [ROWS, WIDTH]: conversions of x 3 + 3, products 3 + 3, joined gradients 3 + 3, their products 4 + 4.
    bound = 27 * ROWS * WIDTH * 2 + 8 * kernel.size * 4
    assert program(gradients, x, kernel, bias, of_part, of_part, of_part).moved_bytes < bound
