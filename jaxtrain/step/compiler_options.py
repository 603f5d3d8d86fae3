"""XLA's options for the programs of a step, each with its reason.

Other backends know the options for GPUs, and ignore them; they are given to programs for GPUs only all the same, except
those of deterministic steps.
"""

import re
from typing import Any

import jax.lib

from jaxtrain.program import is_gpu

CompilerOptions = dict[str, Any]

_DETERMINISTIC: CompilerOptions = {
    # Excludes kernels that add in the order in which threads finish; a program without others does not compile.
    "xla_gpu_deterministic_ops": True,
    # Kernels are not chosen by timing them, which may choose others when a resumed run compiles again …
    "xla_gpu_autotune_level": 0,
    # … and products are cuBLAS's, whose heuristics choose as well: Triton's tiles are chosen by timing alone.
    "xla_gpu_enable_triton_gemm": False,
}

_GPU_MESH: CompilerOptions = {
    # Starts transfers before the computations that do not need them. Before Hopper it is off by default.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Schedules that many at once; they still run one after another. With one, the default, a transfer that starts in
    # the middle of a layer delays all that are small and needed soon.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
_FP8: CompilerOptions = {
    # Small products that share an operand are not merged into one, which would not be recognized as one in 8 bits.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # Triton takes products before they are recognized as such, and multiplies operands converted back to 16 bits.
    "xla_gpu_enable_triton_gemm": False,
}
# Of unrolled layers: transfers of vectors are combined, but not those of matrices. By default one transfer of several
# layers starts when the first parameter is needed, and another one when the last gradient is computed.
_COMBINED_BYTES = 2**20
# In a loop over layers: gathers the next layer's parameters while this layer computes, and reduces its gradients while
# the next one computes. A reduction is an all-reduce when the loop is pipelined; it becomes a reduce-scatter later.
_PIPELINED = ("all_gather", "all_reduce")


def compiler_options(
    *,
    deterministic: bool,
    platform: str | None = None,
    devices: int = 1,
    pipelines_layers: bool = True,
    unrolled: bool = False,
    fp8: bool = False,
) -> CompilerOptions | None:
    """Return the `compiler_options` of `jax.jit`; None for XLA's defaults.

    Args:
      deterministic: Whether the program computes the same bits whenever it is compiled and run on a kind of GPU.
      platform: The platform that it is compiled for; None for that of the default backend.
      devices: The number of devices.
      pipelines_layers: Whether XLA pipelines loops over layers. It would pipeline a `lax.scan` around them too and lose
        its length, for which the host then waits in every iteration; `scan_window` is not pipelined.
      unrolled: Whether layers are compiled one by one.
      fp8: Whether products are in 8 bits.
    """
    options = dict(_DETERMINISTIC) if deterministic else {}
    if fp8 and is_gpu(platform):
        options |= _FP8
    if platform == "gpu" and devices > 1:
        options |= _GPU_MESH
        if unrolled:
            options["xla_gpu_all_gather_combine_threshold_bytes"] = _COMBINED_BYTES
            # Compared to the result, one device's part.
            options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = _COMBINED_BYTES // devices
        if pipelines_layers:
            options |= _pipelining(jax.lib.__version__)
    return options or None


def _release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without what marks a candidate or a build.

    >>> _release("0.11.1rc1"), _release("0.12.0.1"), _release("0.10.1.dev20261101+cpu")
    ((0, 11, 1), (0, 12, 0), (0, 10, 1))
    """
    found = re.match(r"\d+(?:\.\d+){0,2}", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _pipelining(version: str) -> CompilerOptions:
    """Return the options that pipeline collectives, by the names of a version of jaxlib."""
    if _release(version) < (0, 11, 1):
        return {f"xla_gpu_enable_pipelined_{collective}": True for collective in _PIPELINED}
    return {f"xla_gpu_pipeline_{collective}": "COLLECTIVE_PIPELINING_MODE_ON" for collective in _PIPELINED}
