"""The policy bf16_compute: bfloat16 throughout, with float32 inside norms, softmaxes, losses and sums of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.models.batch_norm import BatchNorm
from jaxtrain.models.layer_norm import LayerNorm
from jaxtrain.models.llama import RMSNorm
from jaxtrain.transforms.policies import policy
from tests.models.programs import equations

compute = policy("bf16_compute").apply
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), np.float32)
W, B = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), np.float32), jnp.linspace(-1.0, 1.0, 8)
LABELS = jnp.array([1, 0, 7])


def rounded(x):
    return x.astype(jnp.bfloat16).astype(np.float32)


def low_equations(fn, *args, names):
    """Return the equations of these primitives that have bfloat16 operands, in the function and its gradient."""
    grad = jax.grad(lambda *args: sum(jnp.sum(y.astype(np.float32)) for y in jax.tree.leaves(fn(*args))))
    found = [*equations(jax.make_jaxpr(fn)(*args).jaxpr), *equations(jax.make_jaxpr(grad)(*args).jaxpr)]
    present = {e.primitive.name for e in found} & {*names}
    assert present, "none of them is in the function"
    return [e for e in found if e.primitive.name in names and any(v.aval.dtype == jnp.bfloat16 for v in e.invars)]


SUMS = ("exp", "log", "rsqrt", "reduce_sum", "scatter-add", "div", "square", "integer_pow", "sub")
NORMS_SOFTMAXES_LOSSES = {
    "LayerNorm": (LayerNorm(8, 1e-5), "bfloat16"),
    "RMSNorm": (RMSNorm(8, 1e-5), "bfloat16"),
    "BatchNorm": (lambda x: BatchNorm(8)(x, True), "bfloat16"),
    "flax's LayerNorm": (nnx.LayerNorm(8, rngs=nnx.Rngs(0), use_scale=False, use_bias=False), "bfloat16"),
    "flax's RMSNorm": (nnx.RMSNorm(8, rngs=nnx.Rngs(0), use_scale=False), "bfloat16"),
    "softmax": (jax.nn.softmax, "bfloat16"),
    "masked softmax": (lambda x: jax.nn.softmax(x, where=x < 1), "bfloat16"),
    "softmax by hand": (lambda x: jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum(-1, keepdims=True), "bfloat16"),
    "log_softmax": (jax.nn.log_softmax, "bfloat16"),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), "bfloat16"),
    "softmax in a scan": (lambda x: lax.map(jax.nn.softmax, x), "bfloat16"),
    "softmax in a checkpoint": (jax.checkpoint(lambda x: jax.nn.softmax(x @ x.T)), "bfloat16"),
    "cross_entropy": (lambda x: cross_entropy(x, LABELS), "float32"),
    "masked cross_entropy": (lambda x: jnp.where(LABELS > 0, cross_entropy(x, LABELS), 0.0), "float32"),
}


@pytest.mark.parametrize("name", NORMS_SOFTMAXES_LOSSES)
def test_norms_softmaxes_and_losses_are_float32_inside(name):
    fn, expected = NORMS_SOFTMAXES_LOSSES[name]
    with jax.numpy_dtype_promotion("standard"):  # which flax's layers rely on
        assert low_equations(compute(fn), X, names=SUMS) == []
        out = jax.jit(compute(fn))(X)
        assert out.dtype == expected
        # From the same rounded inputs the results differ by their own rounding alone.
        exact = jax.jit(fn)(rounded(X))
        bound = 2.0**-8 if expected == "bfloat16" else 2.0**-21
        np.testing.assert_array_less(abs(out - exact), bound * (abs(exact) + 2.0**-20) + 1e-30)
