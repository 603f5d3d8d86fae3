"""Profiles: classification of operations, source lines, and time divided among running operations."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.cost.data_sheets import CPU
from jaxtrain.cost.roofline import estimate_seconds
from jaxtrain.errors import RunFailed
from jaxtrain.folder_files import UnsafeFile
from jaxtrain.models.attention import attention
from jaxtrain.profile.estimate import estimate_table
from jaxtrain.profile.kinds import KINDS, kind_of_kernel, kind_of_opcodes
from jaxtrain.profile.program_text import operations
from jaxtrain.profile.trace import (
    INPUT,
    Span,
    StepTrace,
    _divide_time,
    current_source_lines,
    newest_trace,
    table_rows,
    time_table,
)

# Kernels of training steps on A100 and H100, as NVIDIA's profilers name them; XLA's own are named after instructions.
KERNELS = {
    "matmul": [
        "ampere_sgemm_128x64_nn",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(cutlass::Params)",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT_gemm",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "gemm_fusion_dot_12_0",
        "void splitKreduce_kernel<32, 16, int, float, float, float, float>(cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParams)",
    ],
    "convolution": [
        "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc_tilesize128x64x16_stage4_execute_kernel_cudnn",
        "sm86_xmma_dgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_kernel_cudnn",
        "sm80_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_kernel_cudnn",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::WinogradDataParams<float, float>)",
        "__cudnn$convForward",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
        "fmha_v2_flash_attention_fp16_64_64_S_64_sm80_kernel",
        "__cudnn$fmhaSoftmaxBackward",
    ],
    "collective": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "all-reduce-start.1",
        "reduce-scatter.4",
    ],
    "copy": [
        "MemcpyD2D",
        "MemcpyH2D",
        "Memset",
        "wrapped_transpose",
        "copy_fusion.3",
        "loop_dynamic_update_slice_fusion",
    ],
    "elementwise": [
        "loop_add_fusion",
        "input_reduce_fusion_2",
        "loop_convert_fusion_7",
        "input_multiply_reduce_fusion",
        "loop_tanh_fusion",
        "RngBitGenerator",
    ],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_are_classified_by_name(kind):
    assert {name: kind_of_kernel(name) for name in KERNELS[kind]} == dict.fromkeys(KERNELS[kind], kind)


def test_instructions_are_classified_by_opcode():
    assert kind_of_opcodes({"fusion", "parameter", "convolution", "add"}) == "convolution"
    assert kind_of_opcodes({"all-gather-start"}) == kind_of_opcodes({"collective-permute"}) == "collective"
    assert kind_of_opcodes({"fusion", "parameter", "dynamic-update-slice", "bitcast"}) == "copy"
    assert kind_of_opcodes({"fusion", "parameter", "transpose", "multiply"}) == "elementwise"
    assert kind_of_opcodes({"custom-call"}, "__cublas$lt$matmul") == "matmul"
    assert kind_of_opcodes({"custom-call"}, "__cudnn$fmhaSoftmax") == "attention"


def step(x, w, q):
    product = jnp.tanh(x @ w)
    return product, attention(q, q, q, causal=True)


def compiled_step():
    x = jnp.ones((256, 256))
    args = x, x, jnp.ones((2, 32, 2, 16))
    with current_source_lines():
        return jax.jit(step).lower(*args).compile(), args


def test_operations_have_their_source_line():
    program, _ = compiled_step()
    found = operations(program.as_text())
    here = f"profile/test_profile.py:{step.__code__.co_firstlineno + 1}"
    assert {(o.kind, o.line) for o in found.values() if o.line == here} == {("matmul", here), ("elementwise", here)}
    assert {o.kind for o in found.values() if o.line.startswith("attention/formula.py")} >= {"attention"}
    assert {o.kind for o in found.values()} <= set(KINDS)


def test_time_is_divided_among_running_operations():
    def span(name, begin, end, kind="matmul"):
        return Span(begin, end, name, kind, "")

    a, b, a_again = span("a", 10, 30), span("b", 20, 40, "copy"), span("a", 60, 70)
    before = span("early", 0, 5)
    wait = span(INPUT, 35, 55, INPUT)
    times = {s.name or s.kind: ns for s, ns in _divide_time([a, b, a_again, before], [wait], 5, 100).items()}
    assert times == {"a": 10 + 5 + 10, "b": 5 + 10, INPUT: 15, "idle": 5 + 5 + 30}
    assert sum(times.values()) == 95
    table = {row.kind: row for row in table_rows(_divide_time([a, b, a_again], [wait], 5, 100), {a: 2, b: 1}, top=3)}
    assert table["matmul"].count == 2
    assert table["matmul"].share == pytest.approx(25 / 95)
    assert [top.name for top in table["matmul"].top] == ["a"]
    assert table["idle"].top == table["input"].top == []


def test_the_rows_of_a_trace_add_up_to_the_wall_time(tmp_path):
    program, args = compiled_step()
    jax.block_until_ready(program(*args))
    with StepTrace(tmp_path):
        for _ in range(3):
            with jax.profiler.TraceAnnotation(INPUT):
                np.linalg.svd(np.ones((200, 200)))  # slow
            jax.block_until_ready(program(*args))
    trace = newest_trace(tmp_path)
    table = {row.kind: row for row in time_table(trace, program.as_text())}
    assert {"matmul", "elementwise", "attention", "idle", "input"} <= set(table)
    assert sum(row.share for row in table.values()) == pytest.approx(1)
    assert table["matmul"].count >= 3
    here = f"profile/test_profile.py:{step.__code__.co_firstlineno + 1}"
    assert table["matmul"].top[0].line == here
    assert 0 < table["input"].seconds < 10
    # Without the program's text, kinds are derived from names.
    assert "attention" not in {row.kind for row in time_table(trace, "")}
    with pytest.raises(RunFailed, match="holds no trace"):
        newest_trace(tmp_path / "none")


def test_a_trace_without_operations_has_an_empty_table(tmp_path):
    with StepTrace(tmp_path):
        pass
    assert time_table(newest_trace(tmp_path), "") == []


@pytest.mark.parametrize("place", ["", "plugins", "plugins/profile"])
def test_a_trace_is_not_written_through_a_link(place, tmp_path):
    folder, outside = tmp_path / "profile" / place, tmp_path / "outside"
    outside.mkdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(outside)
    with pytest.raises(UnsafeFile), StepTrace(tmp_path / "profile"):
        pass
    assert not [*outside.iterdir()]


def layered(x, w, q):
    """Compute a scanned product, a conditional, attention and a sum."""
    y, _ = jax.lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w)
    z = jax.lax.cond(y.sum() > 0, lambda a: a @ a, lambda a: a, y)
    return z.T.sum(0), attention(q, q, q, causal=True)


def test_the_estimated_table_divides_the_roofline_estimate():
    args = jnp.ones((128, 128)), jnp.ones((5, 128, 128)), jnp.ones((2, 32, 2, 16))
    traced = jax.make_jaxpr(jax.jit(layered))(*args).jaxpr
    table = {row.kind: row for row in estimate_table(traced, CPU, steps=10, top=9)}
    whole = sum(row.seconds for row in table.values())
    assert whole == pytest.approx(10 * estimate_seconds(traced, CPU), rel=1e-9)
    assert sum(row.share for row in table.values()) == pytest.approx(1)
    first = layered.__code__.co_firstlineno
    products = {top.line: top.count for top in table["matmul"].top}
    assert products == {
        f"profile/test_profile.py:{first + 2}": 50,
        f"profile/test_profile.py:{first + 3}": 10,
    }
    assert {top.line.partition(":")[0] for top in table["attention"].top} == {"attention/formula.py"}
    assert "transpose" in {top.name for top in table["copy"].top}
    # On a device with twice the FLOPS and unlimited bandwidth, matrix products take half the time.
    fast = dataclasses.replace(CPU, fp32=2 * CPU.fp32, tf32=2 * CPU.tf32, bandwidth=1e18, launch_overhead_s=0.0)
    slow = dataclasses.replace(fast, fp32=CPU.fp32, tf32=CPU.tf32)
    assert estimate_seconds(traced, slow) == pytest.approx(2 * estimate_seconds(traced, fast), rel=1e-3)
    (of_fast, of_slow) = (estimate_table(traced, device, steps=1)[0] for device in (fast, slow))
    assert (of_fast.kind, of_slow.kind) == ("matmul", "matmul")
    assert of_slow.seconds == pytest.approx(2 * of_fast.seconds, rel=1e-9)


def test_nested_loops_count_as_their_contents():
    """Sums of equal costs in another order differ in their last bits."""

    def inner(x, _):
        return jnp.tanh(x @ x), None

    def outer(x, _):
        return jax.lax.scan(inner, x, length=3)[0], None

    traced = jax.make_jaxpr(lambda x: jax.lax.scan(outer, x, length=5)[0])(jnp.ones((96, 96))).jaxpr
    found = [(top.name, top.count) for row in estimate_table(traced, CPU, steps=10) for top in row.top]
    assert found == [("dot_general", 150), ("tanh", 150)]


def test_xprof_opens_the_trace(tmp_path):
    xspace = pytest.importorskip("xprof.convert.raw_to_tool_data")
    program, args = compiled_step()
    with StepTrace(tmp_path):
        jax.block_until_ready(program(*args))
    data, _ = xspace.xspace_to_tool_data([str(newest_trace(tmp_path))], "trace_viewer", {})
    shown = {event.get("name") for event in json.loads(data)["traceEvents"]}
    products = {name for name, operation in operations(program.as_text()).items() if operation.kind == "matmul"}
    assert shown & products
