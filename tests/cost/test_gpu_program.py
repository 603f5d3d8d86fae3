"""Programs for GPUs, read from small texts in the format of XLA:GPU."""

import math

import pytest

from jaxtrain.cost import GpuProgram, find_target
from jaxtrain.cost.gpu.buffers import peak_buffers
from jaxtrain.cost.gpu.overlap import overlap
from jaxtrain.errors import UserError
from jaxtrain.program.hlo import SourceLines

H100 = find_target("h100")
TRIPS = ', backend_config={"known_trip_count":{"n":"4"}}'
LOOP = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/user/model.py"

FunctionNames
1 "block"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=25}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused_update (p.0: f32[4,256], p.1: f32[256], p.2: s32[]) -> f32[4,256] {
  %p.0 = f32[4,256]{1,0} parameter(0)
  %p.1 = f32[256]{0} parameter(1)
  %p.2 = s32[] parameter(2)
  %row = f32[1,256]{1,0} bitcast(%p.1)
  %zero = s32[] constant(0)
  ROOT %update = f32[4,256]{1,0} dynamic-update-slice(%p.0, %row, %p.2, %zero)
}

%fused_tanh (q.0: f32[256]) -> f32[256] {
  %q.0 = f32[256]{0} parameter(0)
  ROOT %tanh = f32[256]{0} tanh(%q.0)
}

%body (b: (s32[], f32[256], f32[4,256])) -> (s32[], f32[256], f32[4,256]) {
  %b = (s32[], f32[256]{0}, f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[256]{0} get-tuple-element(%b), index=1
  %stack = f32[4,256]{1,0} get-tuple-element(%b), index=2
  %y = f32[256]{0} fusion(%x), kind=kLoop, calls=%fused_tanh, metadata={op_name="tanh" stack_frame_id=1}
  %new = f32[4,256]{1,0} fusion(%stack, %y, %i), kind=kLoop, calls=%fused_update
  ROOT %out = (s32[], f32[256]{0}, f32[4,256]{1,0}) tuple(%i, %y, %new)
}

%condition (c: (s32[], f32[256], f32[4,256])) -> pred[] {
  %c = (s32[], f32[256]{0}, f32[4,256]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (state: f32[256]) -> f32[256] {
  %state = f32[256]{0} parameter(0)
  %zeros = s32[] constant(0)
  %empty = f32[] constant(0)
  %stacked = f32[4,256]{1,0} broadcast(%empty), dimensions={}
  %start = (s32[], f32[256]{0}, f32[4,256]{1,0}) tuple(%zeros, %state, %stacked)
  %loop = (s32[], f32[256]{0}, f32[4,256]{1,0}) while(%start), condition=%condition, body=%body TRIPS
  ROOT %result = f32[256]{0} get-tuple-element(%loop), index=1
}
""".replace(" TRIPS", TRIPS)


def read(hlo, mesh=None):
    return GpuProgram(H100, hlo, mesh or {}, argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)


def entry(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step, is_scheduled=true\n\nENTRY %main (x: bf16[64,32]) -> bf16[64,16] {{\n{body}\n}}\n"


HEAD, _, MAIN = LOOP.rpartition("ENTRY ")
FIRST_COMPUTATION = HEAD.index("%fused_update (")
ENTRY_FIRST = f"{HEAD[:FIRST_COMPUTATION]}ENTRY {MAIN}\n{HEAD[FIRST_COMPUTATION:]}"


@pytest.mark.parametrize("hlo", [LOOP, ENTRY_FIRST], ids=["entry last", "entry first"])
def test_launches_of_a_loop_count_once_an_iteration_and_slices_count_as_slices(hlo):
    program = read(hlo)
    assert program.host_waits == 0
    moved = {launch.instruction.name: (launch.times, launch.moved) for launch in program.launches}
    assert moved["y"] == (4, 2 * 1024)
    # The row that it reads and writes, and the index; not the array that it updates in place.
    assert moved["new"] == (4, 2 * 1024 + 4)
    assert moved["stacked"] == (1, 4096 + 4)
    assert program.moved_bytes == 4 * (2048 + 2052) + 4100


def test_an_asynchronous_update_of_a_slice_counts_as_the_slice():
    new = "%new = f32[4,256]{1,0} fusion(%stack, %y, %i), kind=kLoop, calls=%fused_update"
    pair = (
        "%begun = ((f32[4,256]{1,0}, f32[256]{0}, s32[]), f32[4,256]{1,0}, u32[]) "
        "fusion-start(%stack, %y, %i), kind=kCustom, calls=%fused_update\n"
        "  %new = f32[4,256]{1,0} fusion-done(%begun)"
    )
    assert new in LOOP
    program = read(LOOP.replace(new, pair))
    assert program.moved_bytes == read(LOOP).moved_bytes
    assert program.launch_counts == {"fusion": 8, "broadcast": 1}


def test_an_update_of_a_slice_counts_as_the_slice_in_another_shape():
    update = "  ROOT %update = f32[4,256]{1,0} dynamic-update-slice(%p.0, %row, %p.2, %zero)\n"
    flat = update.replace("ROOT ", "") + "  ROOT %flat = f32[1024]{0} bitcast(%update)\n"
    assert update in LOOP
    assert read(LOOP.replace(update, flat)).moved_bytes == read(LOOP).moved_bytes


def test_an_array_that_is_not_filled_is_no_launch():
    filled = "%stacked = f32[4,256]{1,0} broadcast(%empty), dimensions={}"
    allocated = '%stacked = f32[4,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"'
    assert filled in LOOP
    program = read(LOOP.replace(filled, allocated))
    assert program.moved_bytes == 4 * (2048 + 2052)
    assert program.launch_counts == {"fusion": 8}


FUSED_LABEL = """HloModule jit_step, is_scheduled=true

%fused_label (p.0: bf16[64,40], p.1: s32[64,2]) -> f32[64] {
  %p.0 = bf16[64,40]{1,0} parameter(0)
  %wide = f32[64,40]{1,0} convert(%p.0)
  %classes = f32[64,32]{1,0} slice(%wide), slice={[0:64], [0:32]}
  %p.1 = s32[64,2]{1,0} parameter(1)
  ROOT %label = f32[64]{0} gather(%classes, %p.1), offset_dims={}
}

%fused_wide (q.0: bf16[64,40]) -> f32[64,40] {
  %q.0 = bf16[64,40]{1,0} parameter(0)
  ROOT %all = f32[64,40]{1,0} convert(%q.0)
}

ENTRY %main (x: bf16[64,40], i: s32[64,2]) -> f32[64,40] {
  %x = bf16[64,40]{1,0} parameter(0)
  %i = s32[64,2]{1,0} parameter(1)
  %scores = f32[64]{0} fusion(%x, %i), kind=kLoop, calls=%fused_label
  ROOT %out = f32[64,40]{1,0} fusion(%x), kind=kLoop, calls=%fused_wide
}
"""


def test_a_slice_of_a_conversion_within_a_fusion_counts_as_the_slice():
    moved = {launch.instruction.name: launch.moved for launch in read(FUSED_LABEL).launches}
    # 64 scores in bfloat16, their indices, and the scores in float32.
    assert moved["scores"] == 64 * 2 + 64 * 2 * 4 + 64 * 4
    assert moved["out"] == 64 * 40 * (2 + 4)


EMBEDDING_GRADIENT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_scatter (p.0: f32[512,32], p.1: s32[16,1], p.2: f32[16,1,32]) -> f32[512,32] {
  %p.0 = f32[512,32]{1,0} parameter(0)
  %p.1 = s32[16,1]{1,0} parameter(1)
  %p.2 = f32[16,1,32]{2,1,0} parameter(2)
  ROOT %rows = f32[512,32]{1,0} scatter(%p.0, %p.1, %p.2), update_window_dims={1,2}, to_apply=%add
}

ENTRY %main (tokens: s32[16,1], dx: f32[16,1,32]) -> f32[] {
  %tokens = s32[16,1]{1,0} parameter(0)
  %dx = f32[16,1,32]{2,1,0} parameter(1)
  %zero = f32[] constant(0)
  %table = f32[512,32]{1,0} broadcast(%zero), dimensions={}
  %gradient = f32[512,32]{1,0} fusion(%table, %tokens, %dx), kind=kInput, calls=%fused_scatter
  ROOT %norm = f32[] reduce(%gradient, %zero), dimensions={0,1}, to_apply=%add
}
"""


def test_an_array_to_which_rows_are_added_moves_those_rows_and_stays_in_place():
    program = read(EMBEDDING_GRADIENT)
    moved = {launch.instruction.name: launch.moved for launch in program.launches}
    row = 32 * 4
    # The new rows and their indices, the old rows, and the sums.
    assert moved["gradient"] == 16 * (row + 4) + 16 * row + 16 * row
    assert peak_buffers(program.program, SourceLines(EMBEDDING_GRADIENT))[0] == 512 * row


def test_results_that_update_an_operand_in_place_take_no_additional_memory():
    size, buffers = peak_buffers(read(LOOP).program, SourceLines(LOOP))
    # The stacked array, and the new value of x, which may not take the place of the old one: the loop carries both.
    assert size == 4096
    assert [(buffer.shape, buffer.size_bytes) for buffer in buffers] == [("f32[4,256]", 4096)]


def test_temporaries_of_a_loop_are_alive_beside_what_it_carries():
    new = "  %y = f32[256]{0} fusion(%x),"
    assert new in LOOP
    hlo = LOOP.replace(new, f"  %wide = f32[512]{{0}} fusion(%x), calls=%fused_wide\n{new.replace('%x', '%wide')}")
    size, buffers = peak_buffers(read(hlo).program, SourceLines(hlo))
    assert size == 4096 + 2048
    assert [buffer.shape for buffer in buffers] == ["f32[4,256]", "f32[512]"]


def test_buffers_name_the_source_line():
    hlo = entry(
        "%x = bf16[64,32]{1,0} parameter(0)",
        '%wide = f32[64,32]{1,0} convert(%x), metadata={source_file="/a/model.py" source_line=7}',
        "%sum = f32[64]{0} reduce(%wide), dimensions={1}",
        "ROOT %out = bf16[64]{0} convert(%sum)",
    )
    size, (largest, _) = peak_buffers(read(hlo).program, SourceLines(hlo))
    assert (size, largest.shape, largest.line) == (64 * 32 * 4 + 64 * 4, "f32[64,32]", "model.py:7")


FRAMES = """
FileNames
1 "/python/site-packages/jax/_src/lax.py"
2 "/home/user/model.py"
3 "/home/user/train.py"

FunctionNames
1 "tanh"
2 "block"
3 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5}
2 {file_name_id=2 function_name_id=2 line=7}
3 {file_name_id=3 function_name_id=3 line=9}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}
4 {file_location_id=1 parent_frame_id=1}

ENTRY %main (x: f32[]) -> f32[] {
"""


@pytest.mark.parametrize(
    ("metadata", "line", "functions"),
    [
        ("stack_frame_id=1", "user/train.py:9", ["step"]),
        ("stack_frame_id=3", "user/model.py:7", ["tanh", "block", "step"]),
        ("stack_frame_id=4", "_src/lax.py:5", ["tanh"]),
        ('source_file="/home/user/model.py" source_line=7', "model.py:7", []),
        ('op_name="tanh"', "", []),
    ],
)
def test_an_instruction_has_the_line_of_its_innermost_frame_outside_of_libraries(metadata, line, functions):
    located = SourceLines(FRAMES).locate(f"%y = f32[] tanh(%x), metadata={{{metadata}}}")
    assert located == (line, functions)


def test_the_host_waits_at_conditionals_and_at_loops_of_unknown_length():
    assert read(LOOP.replace(TRIPS, "")).host_waits == 1
    bounded = read(LOOP.replace(TRIPS, ', metadata={op_name="jit(step)/at_most_9_times/while"}'))
    assert (bounded.host_waits, bounded.launch_counts["fusion"]) == (1, 2 * 9)
    branch = entry(
        "%x = bf16[64,32]{1,0} parameter(0)",
        "%p = pred[] constant(true)",
        "ROOT %out = bf16[64,32]{1,0} conditional(%p, %x, %x), true_computation=%main, false_computation=%main",
    ).replace("true_computation=%main, false_computation=%main", "branch_computations={}")
    assert read(branch).host_waits == 1


CUBLAS = (
    '%y = (bf16[64,16]{1,0}, s8[33554432]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}'
)


def test_a_product_has_the_flops_of_its_contraction_and_leaves_the_workspace_out():
    program = read(
        entry(
            "%x = bf16[64,32]{1,0} parameter(0)",
            "%w = bf16[32,16]{1,0} parameter(1)",
            CUBLAS,
            "ROOT %out = bf16[64,16]{1,0} get-tuple-element(%y), index=0",
        )
    )
    (product,) = program.products
    assert (product.by, product.dtypes, product.flops) == ("cuBLAS product", "bf16×bf16→bf16", 2 * 64 * 32 * 16)
    assert not product.full_precision
    assert program.moved_bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    by_bandwidth = program.moved_bytes / H100.ceilings.bandwidth
    assert program.seconds == pytest.approx(max(by_bandwidth, product.flops / (0.75 * 989e12)))


@pytest.mark.parametrize(
    ("device", "peak"), [("h100", 1979e12), ("a100", 312e12)], ids=["of 8 bits", "of the 16 bits they are converted to"]
)
def test_a_product_of_8_bit_operands_has_its_own_peak_rate(device, peak):
    m, k, n = 8192, 2048, 4096
    text = entry(
        f"%x = f8e5m2[{m},{k}]{{1,0}} parameter(0)",
        f"%w = f8e4m3fn[{n},{k}]{{1,0}} parameter(1)",
        "%s = f32[] parameter(2)",
        CUBLAS.replace("$matmul", "$matmul$f8")
        .replace("64,16", f"{m},{n}")
        .replace("%x, %w", "%x, %w, %s, %s")
        .replace('"rhs_contracting_dimensions":["0"]', '"rhs_contracting_dimensions":["1"]'),
        f"ROOT %out = bf16[{m},{n}]{{1,0}} get-tuple-element(%y), index=0",
    )
    program = GpuProgram(find_target(device), text, {}, 0, 0, 0, 0)
    (product,) = program.products
    assert (product.by, product.dtypes) == ("cuBLAS product", "f8e5m2×f8e4m3fn→bf16")
    assert product.flops == 2 * m * k * n
    assert program.moved_bytes == m * k + n * k + 2 * m * n + 2 * 4
    assert program.seconds == pytest.approx(product.flops / (0.75 * peak))


def test_float32_products_are_told_apart_by_their_precision():
    dot = "ROOT %y = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    operands = ("%x = f32[64,32]{1,0} parameter(0)", "%w = f32[32,16]{1,0} parameter(1)")
    (tf32,) = read(entry(*operands, dot)).products
    (full,) = read(entry(*operands, f"{dot}, operand_precision={{highest,highest}}")).products
    assert (tf32.full_precision, full.full_precision) == (False, True)
    assert tf32.flops == full.flops == 2 * 64 * 32 * 16


@pytest.mark.parametrize(
    ("target", "operands", "result", "labels"),
    [
        ("convForward", ("[8,32,32,3]", "[64,3,3,3]"), "[8,32,32,64]", "b01f_o01i->b01f"),
        ("convBackwardInput", ("[8,32,32,64]", "[64,3,3,3]"), "[8,32,32,3]", "b01f_o01i->b01f"),
        ("convBackwardFilter", ("[8,32,32,3]", "[8,32,32,64]"), "[64,3,3,3]", "b01f_o01i->b01f"),
    ],
)
def test_a_convolution_and_its_gradients_have_the_same_flops(target, operands, result, labels):
    left, right = (f"bf16{shape}" for shape in operands)
    program = read(
        entry(
            f"%x = {left} parameter(0)",
            f"%w = {right} parameter(1)",
            f"ROOT %y = (bf16{result}, u8[0]) custom-call(%x, %w), dim_labels={labels}, "
            f'custom_call_target="__cudnn${target}"',
        )
    )
    assert [product.flops for product in program.products] == [2 * 8 * 32 * 32 * 64 * 3 * 3 * 3]


@pytest.mark.parametrize(("target", "products"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
@pytest.mark.parametrize(("mask", "share"), [("CAUSAL", 0.5), ("NO_MASK", 1)])
def test_causal_attention_computes_half_of_its_scores(target, products, mask, share):
    program = read(
        entry(
            "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
            "%k = bf16[2,128,4,64]{3,2,1,0} parameter(1)",
            "ROOT %y = (bf16[2,4,128,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), "
            f'custom_call_target="__cudnn${target}", '
            'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape": {"element_type": "BF16", '
            f'"dimensions": ["2", "4", "128", "128"]}}, "mask_type": "{mask}"}}}}',
        )
    )
    assert [product.flops for product in program.products] == [products * 2 * share * math.prod((2, 4, 128, 128, 64))]


@pytest.mark.parametrize(
    ("kernel", "result", "products"),
    [
        ("fused_attention_causal/attend", "(f32[2,4,128]{2,1,0}, bf16[2,128,4,64]{3,2,1,0})", 2),
        ("fused_attention_backward_causal/differentiate_queries", "bf16[2,128,4,64]{3,2,1,0}", 3),
        ("fused_attention_backward_causal/differentiate_keys", "(bf16[2,256,1,64]{3,2,1,0}, bf16[2,256,1,64])", 4),
    ],
)
@pytest.mark.parametrize("target", ["__gpu$xla.gpu.triton", "triton_kernel_call_ffi"])
def test_a_kernel_of_attention_counts_the_products_that_it_computes(kernel, result, products, target):
    def program(kernel):
        scope, _, name = kernel.partition("/")
        on_mesh = f"{scope}/custom_partitioning"
        scopes = on_mesh if target.startswith("__gpu") and name else f"{kernel}/pallas_call"
        config = f'backend_config={{name = "{name}"}}'
        call = f'custom_call_target="{target}", metadata={{op_name="jit(step)/{scopes}"}}, {config}'
        return read(
            entry(
                "%first = s32[2,8]{1,0} parameter(0)",
                "%q = bf16[2,128,4,64]{3,2,1,0} parameter(1)",
                "%k = bf16[2,256,1,64]{3,2,1,0} parameter(2)",
                "%mask = pred[2,1,128,256]{3,2,1,0} parameter(3)",
                "%lse = f32[2,4,128]{2,1,0} parameter(4)",
                "%bias = bf16[2,4,128,256]{3,2,1,0} parameter(5)",
                f"ROOT %y = {result} custom-call(%first, %bias, %k, %mask, %q, %lse, %k), {call}",
            )
        )

    (product,) = program(kernel).products
    assert (product.by, product.dtypes) == ("Pallas attention", "bf16×bf16→bf16")
    assert product.flops == products * 2 * 2 * 4 * 128 * 256 * 64 / 2
    assert program(kernel.replace("_causal", "")).flops == 2 * product.flops
    assert program("other").launch_counts == {"Pallas kernel": 1}


FUSED_PRODUCT = """
%fused_dot (p.0: bf16[64,32], p.1: bf16[32,16]) -> (bf16[64,16], s8[0]) {
  %p.0 = bf16[64,32]{1,0} parameter(0)
  %p.1 = bf16[32,16]{1,0} parameter(1)
  %dot = bf16[64,16]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %nothing = s8[0]{0} constant({})
  ROOT %both = (bf16[64,16]{1,0}, s8[0]{0}) tuple(%dot, %nothing)
}
"""
CALLS = {
    "cuBLAS": CUBLAS,
    "fusion": "%y = (bf16[64,16]{1,0}, s8[0]{0}) fusion(%x, %w), kind=kOutput, calls=%fused_dot",
}


def with_transfers(call):
    """Return a program that gathers an array while it computes a product, and then adds one."""
    text = entry(
        "%x = bf16[64,32]{1,0} parameter(0)",
        "%w = bf16[32,16]{1,0} parameter(1)",
        "%g = (bf16[64,32]{1,0}, bf16[128,32]{1,0}) all-gather-start(%x), replica_groups=[1,2]<=[2]",
        call,
        "%whole = bf16[128,32]{1,0} all-gather-done(%g)",
        "%s = f32[32]{0} all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%add",
        "ROOT %out = bf16[64,16]{1,0} get-tuple-element(%y), index=0",
    )
    return read(text.replace("\n\n", f"\n{FUSED_PRODUCT}\n", 1), {"data": 2})


def test_a_transfer_counts_the_products_between_its_start_and_its_end():
    program = with_transfers(CUBLAS)
    gather, reduction = program.transfers
    assert (gather.kind, gather.dtypes, gather.result_bytes) == ("all-gather", ("bf16",), 128 * 32 * 2)
    assert (gather.launches, gather.products) == (1, 1)
    assert (reduction.kind, reduction.launches, reduction.products) == ("all-reduce", 0, 0)
    assert program.overlap == (1, 1)
    both = overlap(program.transfers, ("all-gather", "all-reduce"))
    assert both == (1 / 2, pytest.approx(128 * 32 / (128 * 32 + 64 * 32)))


@pytest.mark.parametrize("by", CALLS)
def test_a_transfer_hides_the_time_of_the_launches_beside_it(by):
    """The product, and what the fusion of one moves, are shorter than the gather."""
    program = with_transfers(CALLS[by])
    both_seconds = sum(map(program.collective_seconds, program.communication.traffic))
    hidden = program.product_seconds + program.traffic_seconds
    assert both_seconds - program.exposed_seconds == pytest.approx(hidden, rel=1e-6, abs=0)
    assert program.seconds == pytest.approx(both_seconds, rel=1e-9, abs=0)


def test_the_operands_of_a_started_collective_are_not_sent_twice():
    started, plain = (
        read(
            entry("%x = f32[64]{0} parameter(0)", f"ROOT %y = {collective}(%x), replica_groups=[1,4]<=[4]"), {"data": 4}
        )
        for collective in ("(f32[64]{0}, f32[16]{0}) reduce-scatter-start", "f32[16]{0} reduce-scatter")
    )
    assert started.communication.sent == plain.communication.sent == 16 * 4 * 3


def test_an_unknown_gpu_is_refused():
    with pytest.raises(UserError, match="device 'h900' is not known: choose one of h100, h200, a100"):
        find_target("h900")
