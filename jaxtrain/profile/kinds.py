"""Classification of operations by their opcodes in a compiled program, or by the name of a kernel."""

import re
from collections.abc import Collection

KINDS = ("matmul", "convolution", "attention", "elementwise", "collective", "copy", "input", "idle")

# The first match applies. Names of XLA's custom calls and fusions, and of kernels of cuBLAS, CUTLASS, cuDNN, Triton,
# NCCL and the driver, as NVIDIA's profilers show them.
_NAMES = {
    "attention": r"fmha|flash_?(fwd|bwd|attn)|flash_attention|sdpa|mha_fwd|mha_bwd",
    "collective": r"nccl|all-?_?reduce|all-?_?gather|reduce-?_?scatter|all-?_?to-?_?all|collective|ppermute",
    "convolution": r"conv(?!ert)|winograd|dgrad|wgrad|fprop|implicit_gemm",
    "matmul": r"gemm|gemv|matmul|cublas|cutlass|tensorop|s16816|wgmma|splitk|\bdot\b|dot_|_dot",
    "copy": r"memcpy|memset|\bcopy|copy_|transpose|concatenate|dynamic[-_](update[-_])?slice|broadcast$",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _NAMES.items()}
_COLLECTIVE = ("all-", "reduce-scatter", "collective-")
_DATA_MOVEMENT = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "copy-start", "copy-done", "reshape"),
    *(
        "transpose",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "pad",
        "reverse",
        "broadcast",
        "iota",
    ),
}


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel by its name; elementwise, as most fusions are, if the name is unknown.

    >>> [kind_of_kernel(name) for name in ("ampere_sgemm_128x64_nn", "ncclDevKernel_AllReduce_Sum_f32_RING_LL")]
    ['matmul', 'collective']
    """
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), "elementwise")


def kind_of_opcodes(opcodes: Collection[str], target: str = "") -> str:
    """Return the kind of an instruction from its opcode and those fused into it; `target` is that of a custom call.

    >>> kind_of_opcodes({"fusion", "parameter", "dot", "add"}), kind_of_opcodes({"fusion", "parameter", "transpose"})
    ('matmul', 'copy')
    """
    if target:
        return kind_of_kernel(target)
    if any(opcode.startswith(_COLLECTIVE) for opcode in opcodes):
        return "collective"
    if "convolution" in opcodes:
        return "convolution"
    if "dot" in opcodes:
        return "matmul"
    return "copy" if {*opcodes} - {"fusion"} <= _DATA_MOVEMENT else "elementwise"
