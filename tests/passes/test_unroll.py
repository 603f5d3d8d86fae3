"""Unrolled layers give the same numbers for every precision, dropout and rematerialization."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.passes.memory.unroll import unroll
from jaxtrain.program import equations

CONFIG = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, dropout=0.25)
TOKENS = np.random.default_rng(0).integers(0, 11, size=(4, 7)).astype(np.int32)


def loss_and_params():
    apply, params = functional(GPT2(CONFIG, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, rng):
        losses = cross_entropy(apply(params, batch[:, :-1], rng), batch[:, 1:])
        return jt.Loss(losses.sum(), losses.size), {}

    return loss_fn, params


def names(traced):
    for eqn in traced.eqns:
        yield eqn.primitive.name
        for inner in equations.inner_jaxprs(eqn):
            yield from names(inner)


@pytest.mark.parametrize(
    ("precision", "accumulate", "remat"),
    [
        pytest.param("fp32", 1, "none", marks=pytest.mark.nightly),
        ("bf16", 2, "full"),
        pytest.param("fp16", 1, "names:hidden", marks=pytest.mark.nightly),
    ],
)
def test_a_step_with_unrolled_layers_equals_the_step_with_scanned_ones(precision, accumulate, remat):
    loss_fn, params = loss_and_params()
    results = []
    for unrolled in (False, True):
        step = jt.train_step(
            loss_fn, optax.sgd(0.1), precision=precision, accumulate=accumulate, remat=remat, unroll=unrolled
        )
        state = step.init(params, seed=3)
        scans = [*names(jax.make_jaxpr(step.pure)(state, TOKENS).jaxpr)].count("scan")
        # Accumulation has one; scanned layers have one in the forward pass and one in the backward pass.
        assert scans == (accumulate > 1) + (0 if unrolled else 2)
        for _ in range(2):
            state, metrics = step(state, TOKENS)
        results.append((state.params, metrics["loss"], metrics["grad_norm"]))
    # XLA fuses other operations, and therefore rounds differently.
    eps = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}[precision]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=eps, atol=eps / 10), *results)


def test_in_float64_the_gradients_are_equal_to_rounding():
    loss_fn, params = loss_and_params()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64) * 5, params)
        key = jax.random.key(1)
        scanned, unrolled = (
            jax.jit(jax.grad(lambda p, f=f: f(p, TOKENS, key)[0].total))(params) for f in (loss_fn, unroll(loss_fn))
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), scanned, unrolled)


def test_scans_without_blocks_are_not_unrolled():
    def cumulative(x):
        return jax.lax.scan(lambda total, y: (total + y, total), 0.0, x)[1]

    assert "scan[" in str(jax.make_jaxpr(unroll(cumulative))(jnp.arange(3.0)))


def test_an_unrolled_reversed_scan_keeps_the_order_of_its_outputs():
    layer = jt.block(lambda x, w: x * w + 1.0)

    def layers(x, weights):
        def step(x, w):
            y = layer(x, w)
            return y, y

        return jax.lax.scan(step, x, weights, reverse=True)

    weights = jnp.array([2.0, 3.0, 5.0])
    for a, b in zip(unroll(layers)(1.0, weights), layers(1.0, weights), strict=True):
        np.testing.assert_array_equal(a, b)


def test_on_a_gpu_activations_and_their_gradients_keep_their_layout_between_layers():
    layer = jt.block(lambda x, w: x @ w)

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0].sum()

    arrays = jnp.ones((4, 2)), jnp.ones((3, 2, 2))
    texts = (str(jax.make_jaxpr(jax.grad(unroll(layers, platform)))(*arrays)) for platform in ("cpu", "gpu"))
    assert [text.count("layout_constraint[") for text in texts] == [0, 2 * 3]


def test_on_a_mesh_of_gpus_layers_wait_for_transfers_and_numbers_are_the_same():
    def layers(x, ws):
        return jax.lax.scan(lambda x, w: (jt.block(lambda x: jnp.tanh(x @ w))(x), None), x, ws, reverse=True)[0].sum()

    arrays = jnp.ones((2, 4)), jnp.linspace(-1.0, 1.0, 48).reshape(3, 4, 4)
    on_mesh = jax.value_and_grad(unroll(layers, "gpu", on_mesh=True), argnums=(0, 1))
    text = str(jax.make_jaxpr(on_mesh)(*arrays))
    assert text.count("optimization_barrier") >= 4  # before all layers but the last one, forwards and backwards
    assert "layout_constraint" not in text
    expected = jax.value_and_grad(layers, argnums=(0, 1))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), on_mesh(*arrays), expected)


def test_inference_with_unrolled_layers_equals_inference_with_scanned_ones():
    apply, params = functional(GPT2(dataclasses.replace(CONFIG, dropout=0.0), rngs=nnx.Rngs(0)))
    plain, other = apply(params, TOKENS), unroll(apply)(params, TOKENS)
    np.testing.assert_allclose(plain, other, rtol=1e-5, atol=1e-6)
