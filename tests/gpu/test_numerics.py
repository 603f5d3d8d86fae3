"""Precision on a GPU: float32 and TF32 products, cuDNN's attention, fp16 with a loss scale."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.models.attention import attention
from tests.gpu.language_model import language_model, tokens

# GPU libraries warn about their versions and about buffers that cannot be donated.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
SIDE = 512
RNG = np.random.default_rng(0)
A, B = (RNG.normal(size=(SIDE, SIDE)) for _ in range(2))


def relative_error(precision, *, disabled=False):
    """Return the root mean square error of A @ B relative to its own, in a loss compiled with this precision."""
    exact = A.astype(np.float32).astype(np.float64) @ B.astype(np.float32).astype(np.float64)

    def loss_fn(params, batch, rng):
        def product():
            return batch["a"] @ batch["b"]

        made = jt.autocast_disabled()(product)() if disabled else product()
        return jt.Loss.of((made.astype(jnp.float32) - batch["exact"]) ** 2), {}

    batch = {name: x.astype(np.float32) for name, x in (("a", A), ("b", B), ("exact", exact))}
    state = jt.train_step(loss_fn, optax.sgd(0.1)).init({"w": jnp.zeros(1)})
    total = jt.eval_step(loss_fn, precision=precision)(state, batch)["loss"].total
    return float(np.sqrt(total / (exact**2).sum()))


def numpys_error():
    a, b = A.astype(np.float32), B.astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.sqrt((((a @ b) - exact) ** 2).sum() / (exact**2).sum())) + 2.0**-24


@pytest.mark.parametrize(("precision", "disabled"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_products_in_float32_are_in_full_precision(precision, disabled):
    assert relative_error(precision, disabled=disabled) <= 8 * numpys_error()


def test_tf32_rounds_operands_to_eleven_bits(gpu):
    if float(gpu.compute_capability) < 8.0:
        pytest.skip("needs Ampere or newer")
    # The rounding error of an operand is uniform up to 2^-11 of its magnitude.
    assert 2.0**-14 < relative_error("tf32") < 2.0**-10


HEADS, WIDTH, LENGTH = 4, 64, 256
QKV = tuple(RNG.normal(size=(2, LENGTH, HEADS, WIDTH)).astype(np.float32) for _ in range(3))


def attention_gradients(policy, remat="none"):
    """Return the gradients of an attention's square by q, k and v, and the compiled program."""

    def loss_fn(params, batch, rng):
        made = jt.block(lambda params: attention(*params, causal=True))(params)
        return jt.Loss((made.astype(jnp.float32) ** 2).sum(), weight=1), {}

    scale = jt.static_loss_scale(1.0)  # the sum of squares would overflow with a larger one
    step = jt.train_step(loss_fn, optax.sgd(1.0), precision=policy, remat=remat, loss_scale=scale)
    state, batch = step.init(tuple(map(jnp.asarray, QKV))), {"x": np.zeros(1, np.float32)}
    text = step.compile(state, batch).as_text()
    new, _ = step(state, batch)
    return [np.float64(old) - np.float64(x) for old, x in zip(QKV, new.params, strict=True)], text


def exact_gradients():
    """Return the gradients in float64."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in QKV)
    scores = q @ k.swapaxes(2, 3) / np.sqrt(WIDTH)
    scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    by_out = 2 * (weights @ v)
    by_weights = by_out @ v.swapaxes(2, 3)
    by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdims=True)) / np.sqrt(WIDTH)
    found = by_scores @ k, by_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ by_out
    return [x.transpose(0, 2, 1, 3) for x in found]


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize(("precision", "bits"), [("bf16", 8), ("fp16", 11)])
def test_cudnns_attention_is_used_and_its_gradients_are_as_accurate_as_its_dtype(precision, bits, remat):
    found, text = attention_gradients(precision, remat)
    for ours, exact in zip(found, exact_gradients(), strict=True):
        # Few roundings of operands and results to the dtype, each of at most 2^-bits.
        assert np.sqrt(((ours - exact) ** 2).mean() / (exact**2).mean()) < 4 * 2.0**-bits
    assert "__cudnn$fmhaSoftmax" in text.replace("__cudnn$fmhaSoftmaxBackward", "")
    assert "__cudnn$fmhaSoftmaxBackward" in text


def test_fp16_windows_skip_overflows_and_then_learn():
    create, loss_fn = language_model()
    scale = jt.dynamic_loss_scale(init_scale=2.0**30, growth_interval=1000)
    step = jt.train_step(loss_fn, optax.adam(1e-3), precision="fp16", accumulate=2, clip_norm=1.0, loss_scale=scale)
    state, batch = step.init(create), tokens(8)
    seen = []
    for _ in range(40):
        before = jax.device_get(state.params)
        state, metrics = step(state, batch)
        seen.append({name: x.item() for name, x in jax.device_get(metrics).items()})
        if seen[-1]["skipped"]:
            same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), before, state.params)
            assert all(jax.tree.leaves(same))
    skips = [line["skipped"] for line in seen]
    assert skips[0]
    assert not skips[-1]
    for line, following in itertools.pairwise(seen):
        assert following["loss_scale"] == line["loss_scale"] / (2 if line["skipped"] else 1)
    assert seen[-1]["applied"] == 40 - sum(skips)
    assert seen[-1]["loss"] < seen[0]["loss"]
