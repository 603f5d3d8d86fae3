"""XLA's options for steps that compute the same bits whenever they are compiled and run on a kind of GPU.

Other backends know the options, and ignore them: their programs are deterministic.
"""

CompilerOptions = dict[str, bool | int]

_DETERMINISTIC: CompilerOptions = {
    # Excludes kernels that add in the order in which threads finish; a program without others does not compile.
    "xla_gpu_deterministic_ops": True,
    # Kernels are not chosen by timing them, which may choose others when a resumed run compiles again …
    "xla_gpu_autotune_level": 0,
    # … and products are cuBLAS's, whose heuristics choose as well: Triton's tiles are chosen by timing alone.
    "xla_gpu_enable_triton_gemm": False,
}


def compiler_options(*, deterministic: bool) -> CompilerOptions | None:
    """Return the `compiler_options` of `jax.jit`; None for XLA's defaults."""
    return dict(_DETERMINISTIC) if deterministic else None
