"""Products in 8 bits in programs compiled for an H100."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.published import Llama1B
from jaxtrain.cost import find_target
from jaxtrain.cost.gpu import compile_for_gpu, gpu_devices
from jaxtrain.passes.fp8.scaled_product import scaled_product
from jaxtrain.passes.fp8.scales import E4M3, E5M2, Quantized
from jaxtrain.planning.candidate import abstract_batch
from jaxtrain.planning.gpu import gpu_program
from jaxtrain.runner import training_step
from tests.gpu_programs.families import FAMILIES, LAYERS, VOCABULARY, WIDTH, Settings, program

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")

ROWS, FEATURES = 512, 1024
LINEAR_LAYERS = 7 * LAYERS


def compiled(fn, *shapes):
    target = find_target("h100")
    sharding = SingleDeviceSharding(gpu_devices(target, 1)[0])
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    return compile_for_gpu(lambda: jax.jit(fn).lower(*arrays), target)


def test_a_scaled_product_with_a_bias_is_one_call_with_scales_in_float32():
    def product(x, x_scale, kernel, kernel_scale, bias):
        operands = Quantized(x, x_scale), Quantized(kernel, kernel_scale)
        return scaled_product(*operands, (((1,), (1,)), ((), ())), jnp.bfloat16, bias)

    one = (1, 1), np.float32
    shapes = ((ROWS, WIDTH), E5M2), one, ((FEATURES, WIDTH), E4M3), one, ((1, FEATURES), jnp.bfloat16)
    found = compiled(product, *shapes)
    assert dict(found.product_dtypes) == {"f8e5m2×f8e4m3fn→bf16": 1}
    assert found.products[0].instruction.target == "__cublas$lt$matmul$f8"
    assert found.moved_bytes < ROWS * WIDTH + FEATURES * WIDTH + 2 * ROWS * FEATURES + 2 * FEATURES + 64
    roundings = re.findall(r"= bf16\[(?:1,1)?\]\S* convert", found.hlo)
    assert not roundings, "a scale is rounded"


@pytest.mark.parametrize(
    ("precision", "accumulate", "unroll"),
    [("fp8", 1, False), ("fp8", 2, False), ("fp8_delayed", 2, True), ("fp8_row", 1, False)],
)
def test_all_products_with_kernels_are_in_8_bits(precision, accumulate, unroll):
    found = program(Settings("llama", precision, accumulate=accumulate, unroll=unroll))
    products = found.product_dtypes
    # The output layer, with its gradients, and attention.
    assert products.pop("bf16×bf16→bf16") == accumulate * (3 + 2 * LAYERS)
    times = LINEAR_LAYERS * accumulate
    if precision != "fp8_row":
        operands = ("f8e4m3fn×f8e4m3fn", "f8e5m2×f8e4m3fn", "f8e4m3fn×f8e5m2")
        assert products == {f"{pair}→bf16": times for pair in operands}
    else:
        # Scaled in a kernel of its own. XLA merges some that share an operand.
        assert products.keys() == {"f8e4m3fn×f8e4m3fn→f32"}
        assert 2 * times < products.total() <= 3 * times
    calls = {p.instruction.target for p in found.products if p.operands[0].startswith("f8")}
    assert calls == {"__cublas$lt$matmul$f8"}
    assert found.host_waits == 0


def test_products_are_in_8_bits_with_the_options_of_the_step_alone(monkeypatch):
    # What a device compiles; `compile_for_gpu` adds options that make programs comparable.
    monkeypatch.setattr("jaxtrain.cost.gpu.compiled_program.COMPILER_OPTIONS", {"xla_gpu_autotune_level": "0"})
    products = program(Settings("llama", "fp8")).product_dtypes
    assert sum(times for dtypes, times in products.items() if dtypes.startswith("f8")) == 3 * LINEAR_LAYERS


def _llama(precision, accumulate=1):
    recipe = Llama1B(batch_size=16, seq_len=2048, precision=precision, remat="none", accumulate=accumulate)
    task = recipe.task()
    return gpu_program(
        training_step(recipe, task), task.shapes().params, abstract_batch(recipe, task), rules=task.sharding
    )


def test_a_step_of_llama_1b_takes_three_quarters_of_the_time_in_fp8():
    """16 layers, 16 × 2,048 tokens: the figures of docs/performance.md."""
    bf16, fp8, delayed = map(_llama, ("bf16", "fp8", "fp8_delayed"))
    assert max(fp8.seconds, delayed.seconds) <= 0.75 * bf16.seconds
    assert fp8.moved_bytes <= 1.016 * bf16.moved_bytes
    assert delayed.moved_bytes <= bf16.moved_bytes
    assert delayed.product_dtypes == fp8.product_dtypes
    in_8_bits = [p for p in fp8.products if p.operands[0].startswith("f8")]
    assert sum(p.times for p in in_8_bits) == 3 * 7 * 16
    # Gradients by the rows of queries, keys and values, and of gate and up, are added in the products.
    added = [p for p in in_8_bits if '"beta":1' in fp8.hlo.split(f"%{p.instruction.name} = ")[1].split("\n")[0]]
    assert sum(p.times for p in added) == 3 * 16


def test_a_window_of_llama_1b_moves_less_in_fp8():
    """Kernels are converted once for the four micro-batches of a window."""
    bf16, fp8, delayed = (_llama(precision, accumulate=4) for precision in ("bf16", "fp8", "fp8_delayed"))
    assert delayed.moved_bytes < fp8.moved_bytes < bf16.moved_bytes
    assert fp8.seconds <= 0.751 * bf16.seconds
    assert delayed.seconds <= 0.75 * bf16.seconds
    assert delayed.product_dtypes == fp8.product_dtypes


@pytest.mark.parametrize(
    ("reshard_after", "times"), [("forward", 2), pytest.param("window", 1, marks=pytest.mark.nightly)]
)
def test_fsdp_gathers_kernels_in_8_bits(reshard_after, times):
    """Of the other parameters the tables are gathered: in bfloat16 that of the output, in float32 the embeddings."""
    found = program(Settings("llama", "fp8", mesh="fsdp=8", reshard_after=reshard_after))
    params = jax.tree.leaves_with_path(FAMILIES["llama"]().params)
    kernels = sum(math.prod(x.shape) for path, x in params if "kernel" in str(path) and len(x.shape) == 3)
    tables = 6 * VOCABULARY * WIDTH
    assert kernels == LAYERS * 9 * WIDTH**2
    sent = sum(t.sent for t in found.communication.traffic if t.kind == "all-gather")
    assert times * kernels < 8 / 7 * sent < times * kernels + 1.05 * tables
