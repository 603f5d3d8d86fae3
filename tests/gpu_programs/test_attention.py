"""Attention in programs compiled for GPUs: cuDNN's kernel where the GPU has it, once a layer and pass."""

import dataclasses
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from benchmarks.predicted import case_program
from benchmarks.workloads import WORKLOADS
from jaxtrain.cost.gpu import TARGETS, compile_for_gpu
from jaxtrain.cost.gpu.launches import Program
from jaxtrain.cost.gpu.target import COMPILER_OPTIONS
from jaxtrain.distributed import make_mesh, parse_mesh, shard
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional, gpt2
from jaxtrain.models.attention import attention
from jaxtrain.optim import adamw

B, T, N, H, LAYERS = 4, 96, 4, 64, 2
SOFTMAX, BIASED = "__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax"


def on(sharding, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def calls(lowered):
    """Return how often the compiled program runs each kind of attention; it has no branch and no scores."""
    text = lowered.compile(compiler_options=COMPILER_OPTIONS).as_text()
    assert " conditional(" not in text
    launches = Program.parse(text).launches
    results = [array for launch in launches for array in launch.instruction.results]
    assert not any(array.dtype == "f32" and array.shape[-2:] == (T, T) for array in results)  # no scores
    assert f"[{LAYERS},{B},{N},{T},{T}]" not in text  # nor a place for those of all layers
    runs = Counter()
    for launch in launches:
        if launch.instruction.target.startswith("__cudnn$fmha"):
            runs[launch.instruction.target] += launch.times
    return dict(runs)


def attention_calls(device, dtype, *, heads=N, width=H, mask=None, bias=None, **options):
    def summed(q, k, v, bias, mask):
        return attention(q, k, v, mask=mask, bias=bias, **options).astype(np.float32).sum()

    shapes = [((B, T, n, width), dtype) for n in (N, heads, heads)] + [(bias, dtype), (mask, np.bool_)]
    sharding = SingleDeviceSharding(device)
    arrays = [None if shape[0] is None else jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    return calls(jax.jit(jax.grad(summed, argnums=(0, 1, 2, 3))).lower(*arrays))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_masks_windows_and_groups_are_fused(gpus, dtype):
    (device,) = gpus(9)
    of = partial(attention_calls, device, dtype)
    for options in ({}, {"causal": True}, {"causal": True, "window": 8}, {"causal": True, "heads": 2}, {"width": 256}):
        assert of(**options) == {SOFTMAX: 1, f"{SOFTMAX}Backward": 1}
    for options in ({"mask": (B, 1, 1, T)}, {"mask": (B, 1, T, T), "causal": True, "heads": 1}):
        assert of(**options) == {BIASED: 1, f"{BIASED}Backward": 1}


def test_a_bias_is_fused_with_its_gradient_from_hopper_on(gpus):
    biased = {BIASED: 1, f"{BIASED}Backward": 1}
    of = partial(attention_calls, dtype=jnp.bfloat16, bias=(1, N, T, T))
    assert of(gpus(9)[0]) == of(gpus(9)[0], causal=True) == of(gpus(9)[0], mask=(B, 1, 1, T)) == biased
    shapes = [jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((1, N, T, T), jnp.bfloat16)]
    traced = jax.jit(lambda q, k, v, bias: attention(q, k, v, bias=bias))
    assert "cudnn" not in traced.lower(*on(SingleDeviceSharding(gpus(8)[0]), shapes)).as_text()


def test_a_gpu_without_the_kernel_computes_the_formula(gpus):
    traced = jax.jit(jax.grad(lambda *qkv: attention(*qkv, causal=True).astype(np.float32).sum()))
    for device, width in ((gpus(7, 5)[0], H), (gpus(8)[0], 256), (gpus(10)[0], 256)):
        shapes = [jax.ShapeDtypeStruct((B, T, N, width), np.float16)] * 3
        assert "cudnn" not in traced.lower(*on(SingleDeviceSharding(device), shapes)).as_text()
    assert attention_calls(gpus(8)[0], jnp.bfloat16, causal=True) == {SOFTMAX: 1, f"{SOFTMAX}Backward": 1}


def gpt2_step(devices, mesh="", length=T, segments=False, **options):
    """Return the lowered step of a small GPT-2."""
    config = GPT2Config(vocab_size=128, n_positions=length, n_embd=N * H, n_layer=LAYERS, n_head=N)
    apply, params = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))

    def loss_fn(params, batch, rng):
        logits = apply(params, batch["tokens"][:, :-1], rng, None, batch.get("segments"))
        losses = cross_entropy(logits, batch["tokens"][:, 1:])
        return jt.Loss(losses.sum(), weight=losses.size), {}

    step = jt.train_step(loss_fn, adamw(1e-3), precision="bf16", **options)
    batch = {"tokens": jax.ShapeDtypeStruct((B, length + 1), np.int32)}
    if segments:
        batch["segments"] = jax.ShapeDtypeStruct((B, length), np.int32)
    make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)  # noqa: E731
    if not mesh:
        return step.jitted.lower(*on(SingleDeviceSharding(devices[0]), (step.shapes(make), batch)))
    mesh = make_mesh(mesh, devices)
    step = shard(step, mesh, gpt2.SHARDING)
    rows = NamedSharding(mesh, P(tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)))
    return step.jitted.lower(step.shapes(make), on(rows, batch))


# In test_contract, the programs of scanned layers and one of unrolled ones.
@pytest.mark.nightly
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("dots", 1), ("full", 2)])
def test_attention_runs_once_a_layer_unless_all_is_computed_again(gpus, remat, forwards):
    expected = {SOFTMAX: forwards * LAYERS, f"{SOFTMAX}Backward": LAYERS}
    assert calls(gpt2_step(gpus(9), remat=remat, unroll=True)) == expected
    assert calls(gpt2_step(gpus(9), remat=remat)) == expected


# In test_contract, data and tensor.
@pytest.mark.parametrize(
    "mesh", ["sequence=2", *(pytest.param(f"{axis}=2", marks=pytest.mark.nightly) for axis in ("data", "tensor"))]
)
def test_attention_is_fused_on_a_mesh(gpus, mesh):
    assert calls(gpt2_step(gpus(9, count=2), mesh)) == {SOFTMAX: LAYERS, f"{SOFTMAX}Backward": LAYERS}


@pytest.mark.parametrize(
    "mesh",
    ["sequence=2", *(pytest.param(f"{axis}=2", marks=pytest.mark.nightly) for axis in ("data", "fsdp", "tensor"))],
)
def test_long_packed_rows_are_divided_over_a_mesh_without_a_mask(gpus, mesh):
    length = 1280
    lowered = gpt2_step(gpus(9, count=2), mesh, length, segments=True)
    program = compile_for_gpu(lowered, TARGETS["h100"], parse_mesh(mesh))
    assert program.host_waits == 0
    results = [array for launch in program.launches for array in launch.instruction.results]
    assert not any(array.shape[-2:] == (length, length) for array in results)
    kernels = [launch for launch in program.launches if launch.kind == "Pallas attention"]
    assert sum(launch.times for launch in kernels) == 3 * LAYERS
    # Each device has half of the rows or of the heads.
    of_device = {array.size for launch in kernels for array in launch.instruction.results if array.dtype == "bf16"}
    assert of_device == {B * length * N * H // 2}


@pytest.mark.usefixtures("gpus")
def test_packed_rows_take_as_much_memory_and_traffic_as_unpacked_ones():
    """Of two layers of a Llama with 160M parameters, within a tenth."""
    case = WORKLOADS["llama-160m"].case({"depth": 2, "rows": 4, "length": 2048})
    whole = dataclasses.replace(
        case, loss_fn=lambda params, batch, rng: case.loss_fn(params, {**batch, "segments": None}, rng)
    )
    packed, unpacked = (case_program(each, unroll=False) for each in (case, whole))
    assert ",2048,2048]" not in packed.hlo
    assert packed.temporary_bytes <= 1.1 * unpacked.temporary_bytes
    assert packed.moved_bytes <= 1.1 * unpacked.moved_bytes
    # Our kernels compute scores and their gradients for queries and for keys: 9 products instead of 7.
    attention = [sum(p.flops * p.times for p in x.products if "attention" in p.by) for x in (packed, unpacked)]
    assert attention[0] == attention[1] * 9 / 7
    assert packed.flops - attention[0] == unpacked.flops - attention[1]
