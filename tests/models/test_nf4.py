"""Kernels in 4 bits: the bits of bitsandbytes, products, gradients and memory."""

import hashlib
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.distributed import make_mesh
from jaxtrain.distributed.sharding import param_shardings
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, LoraConfig, functional, gpt2, lora, nf4
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.program.equations import visit
from jaxtrain.runner.checkpoint import Checkpoints

TARGETS = r"blocks/(qkv|fc|mlp_proj)/kernel"
SIZES = GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=3, n_head=2)
TOKENS = np.random.default_rng(0).integers(0, 11, size=(3, 6)).astype(np.int32)

BITSANDBYTES = {
    ("float32", 1, (30, 20)): ("14929cd88a916dde", "d69644ea68a0053c", "92090e968ca88659"),
    ("bfloat16", 0, (96, 128)): ("9c92ed3c6ec145d5", "8ba58fb960f4577b", "186d3ee15d2235b3"),
    ("float16", 0, (96, 128)): ("820b5886b544cd11", "8cd6efd3ffb78cc2", "3d420fd0519f198d"),
}
"""SHA-256, the first 16 digits, of what bitsandbytes 0.50.2 computes on a CPU from normal weights: the packed weights,
the quantized magnitudes and the dequantized weights, by dtype, seed and shape."""


def weights(dtype, seed, shape):
    return jnp.asarray((0.05 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)).astype(dtype)


def digest(array):
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("case", BITSANDBYTES)
def test_all_bits_are_those_that_bitsandbytes_computes(case):
    kernel = nf4.quantize(weights(*case), out_in=True)
    assert (kernel.shape, kernel.dtype) == (case[2], case[0])
    dequantized = jax.jit(nf4.QuantizedKernel.array)(kernel)
    assert tuple(map(digest, (kernel.packed, kernel.magnitudes, dequantized))) == BITSANDBYTES[case]
    if case[0] == "float16":
        stacked = jnp.stack([weights(*case).T] * 2)
        of_stack = jax.jit(nf4.dequantize_params)(nf4.quantize_params({"w": stacked}, "w"))["w"]
        np.testing.assert_array_equal(of_stack, jnp.stack([dequantized.T] * 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("shape", [(30, 20), (512, 192), (7, 9)])
def test_bits_equal_those_of_bitsandbytes(dtype, shape):
    """Its kernel for the CPU finds the nearest of 256 values with a table; its kernels for other devices are exact."""
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    kernel = weights(dtype, 3, shape)
    theirs = torch.tensor(np.asarray(kernel, np.float32)).to(getattr(torch, dtype))
    packed, state = bnb.functional.quantize_4bit(theirs, compress_statistics=True, quant_type="nf4")
    ours = nf4.quantize(kernel, out_in=True)
    np.testing.assert_array_equal(ours.packed.reshape(-1), packed.numpy().reshape(-1))
    # The order in which the mean is summed is the device's.
    np.testing.assert_array_max_ulp(np.asarray(ours.offset), state.offset.numpy(), maxulp=1)
    if ours.magnitudes.size > 1:  # a single one less their mean is 0
        exact = torch.ops.bitsandbytes.quantize_blockwise.default._op_dk
        magnitudes = bnb.functional.quantize_4bit(theirs, compress_statistics=False, quant_type="nf4")[1].absmax
        less_mean = magnitudes - torch.tensor(float(ours.offset))
        dispatched = torch._C.DispatchKey.CompositeExplicitAutograd
        indices, scales = exact(dispatched, less_mean, bnb.functional.create_dynamic_map(), nf4.MAGNITUDES_BLOCK)
        np.testing.assert_array_equal(ours.magnitudes.reshape(-1), indices.numpy())
        np.testing.assert_array_equal(ours.scales, scales.numpy())
    read = replace(
        ours,
        magnitudes=jnp.asarray(state.absmax.numpy().reshape(ours.magnitudes.shape)),
        scales=jnp.asarray(state.state2.absmax.numpy()),
        offset=jnp.asarray(state.offset.numpy()),
    )
    expected = bnb.functional.dequantize_4bit(packed, state).float().numpy()
    np.testing.assert_array_equal(jax.jit(nf4.QuantizedKernel.array)(read).astype(np.float32), expected)


def model(sizes=SIZES):
    apply, params = functional(GPT2(sizes, rngs=nnx.Rngs(0)))
    return apply, params, nf4.quantize_params(params, TARGETS)


def test_adapters_on_quantized_kernels_are_those_on_dequantized_ones():
    apply, params, quantized = model()
    config = LoraConfig(r"blocks/(qkv|fc)/kernel", r=2, dora=True)
    adapters = jax.tree.map(lambda x: x + 0.1, lora.init(jax.random.key(0), quantized, config))
    adapted = lora.with_adapters(apply, config)

    def loss(base):
        def of_adapters(adapters):
            logits = adapted({"base": base, "lora": adapters}, TOKENS[:, :-1])
            return cross_entropy(logits, TOKENS[:, 1:]).mean()

        return jax.value_and_grad(of_adapters)

    dequantized = nf4.dequantize_params(quantized)
    assert np.abs(dequantized["blocks"]["mlp_proj"]["kernel"] - params["blocks"]["mlp_proj"]["kernel"]).max() > 1e-3
    found, expected = jax.jit(lambda a: (loss(quantized)(a), loss(dequantized)(a)))(adapters)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected)
    merged = lora.merge(quantized, adapters, config)
    assert jax.tree.map(np.shape, merged) == jax.tree.map(np.shape, params)


def test_a_step_trains_adapters_in_low_precision_and_leaves_the_quantized_kernels(tmp_path):
    apply, _, quantized = model()
    config = LoraConfig(r"blocks/(qkv|fc)/kernel", r=2, dropout=0.1)
    adapted = lora.with_adapters(apply, config)

    def loss_fn(params, batch, rng):
        return jt.Loss.of(cross_entropy(adapted(params, batch[:, :-1], rng=rng), batch[:, 1:])), {}

    step = jt.train_step(
        loss_fn, optax.adam(1e-2), precision="bf16", accumulate=3, remat="full", frozen=lora.frozen, clip_norm=1.0
    )
    state = step.init({"base": quantized, "lora": lora.init(jax.random.key(0), quantized, config)})
    losses = []
    for _ in range(20):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    jax.tree.map(np.testing.assert_array_equal, state.params["base"], quantized)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(jax.eval_shape(lambda: state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


def test_at_most_a_layer_is_dequantized_at_a_time():
    """Without rematerialization too: the backward pass dequantizes again instead of storing the kernels."""
    width, layers = 256, 8
    params = {"w": 0.05 * jax.random.normal(jax.random.key(0), (layers, width, width))}

    def scanned(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0].sum()

    quantized, x = nf4.quantize_params(params, "w"), jnp.ones((2, width))
    compiled = jax.jit(jax.grad(nf4.with_quantized(scanned), argnums=1)).lower(quantized, x).compile()
    assert not re.search(rf"(f32|bf16)\[{layers},{width},{width}\]", compiled.as_text())
    a_kernel = 4 * width * width
    assert a_kernel <= compiled.memory_analysis().temp_size_in_bytes < 3.5 * a_kernel
    found, expected = compiled(quantized, x), jax.grad(scanned, argnums=1)(nf4.dequantize_params(quantized), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_under_autocast_a_biased_layer_stays_in_low_precision():
    params = {"w": nf4.quantize(jnp.ones((64, 3))), "b": jnp.ones(3)}
    layer = nf4.with_quantized(lambda p, x: x @ p["w"] + p["b"][None])
    traced = jax.make_jaxpr(jax.grad(lambda x: autocast(layer, jnp.bfloat16)(params, x).sum()))(jnp.ones((2, 64)))
    assert autocast(layer, jnp.bfloat16)(params, jnp.ones((2, 64))).dtype == jnp.bfloat16
    products = [eqn for eqn in visit(traced.jaxpr) if eqn.primitive.name == "dot_general"]
    assert {v.aval.dtype.name for eqn in products for v in eqn.invars} == {"bfloat16"}


def test_quantized_kernels_are_sharded_as_their_kernels():
    sizes = GPT2Config(vocab_size=11, n_positions=8, n_embd=128, n_layer=2, n_head=2)
    shapes = jax.eval_shape(lambda: model(sizes)[2])
    rules = lora.sharding(nf4.sharding(gpt2.SHARDING))
    found = param_shardings({"base": shapes}, make_mesh("fsdp=2,tensor=2"), rules)["base"]["blocks"]["fc"]["kernel"]
    assert found.packed.spec == found.magnitudes.spec == P("pipeline", "tensor", "fsdp")
    assert found.scales.is_fully_replicated
    assert found.offset.is_fully_replicated


def test_other_arrays_are_refused():
    with pytest.raises(jt.UserError, match=r"'kernel' match no whole path: the model has .*blocks/fc/kernel"):
        nf4.quantize_params(model()[1], "kernel")
    with pytest.raises(jt.UserError, match=r"kernel \[in, out\] of a linear layer, got float32\[4\]"):
        nf4.quantize(jnp.ones(4))
