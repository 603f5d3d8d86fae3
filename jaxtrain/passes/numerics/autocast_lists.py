"""The dtype of each operation under autocast: PyTorch's lists for each device in terms of JAX's primitives.

Every line names the PyTorch operations that its primitive stands for, as listed in `aten/src/ATen/autocast_mode.h` for
CUDA and in `aten/src/ATen/autocast_mode.cpp` (TORCH_LIBRARY_IMPL(aten, AutocastCPU)) for the CPU. A primitive without
a line runs in the widest dtype of its inputs, as an unlisted PyTorch operation, whose kernel promotes mixed inputs.
`UNLISTED` names those of JAX, so that a new primitive is noticed.
"""

from enum import Enum
from types import MappingProxyType


class Dtype(Enum):
    """The dtype that a listed operation computes in, and the dtype of its result."""

    LOW = "computed in autocast's dtype"
    FLOAT32 = "computed, and returned, in float32"
    ROUNDED = "computed in float32, returned in the widest dtype of its inputs"


LOW, FLOAT32, ROUNDED = Dtype

_PRODUCTS = {
    "dot_general": (LOW, "matmul, mm, mv, bmm, linear, addmm, baddbmm, einsum, linalg_vecdot, attention"),
    "ragged_dot_general": (LOW, "_grouped_mm: a bmm of unequal batches"),
    "conv_general_dilated": (LOW, "conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d"),
}

_NONE_IN_LOW_PRECISION = "without a low-precision version, in XLA as in PyTorch"

_DECOMPOSITIONS = {
    name: (FLOAT32, f"linalg.{name}, {_NONE_IN_LOW_PRECISION}")
    for name in (
        *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu"),
        *("ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
    )
}

CUDA = {
    # AT_FORALL_LOWER_PRECISION_FP
    **_PRODUCTS,
    # AT_FORALL_FP32
    "acos": (FLOAT32, "acos"),
    "asin": (FLOAT32, "asin"),
    "cosh": (FLOAT32, "cosh"),
    "erf_inv": (FLOAT32, "erfinv"),
    "exp": (FLOAT32, "exp, and within softmax, log_softmax, logsumexp"),
    "exp2": (FLOAT32, "pow.Scalar(2, x)"),
    "expm1": (FLOAT32, "expm1"),
    "log": (FLOAT32, "log, log10"),
    "log1p": (FLOAT32, "log1p, and within softplus"),
    "log2": (FLOAT32, "log2"),
    "rsqrt": (FLOAT32, "rsqrt, and within layer_norm, rms_norm, group_norm"),
    "sinh": (FLOAT32, "sinh"),
    "tan": (FLOAT32, "tan"),
    "pow": (FLOAT32, "pow.Tensor_Tensor, pow.Tensor_Scalar, pow.Scalar"),
    "integer_pow": (FLOAT32, "pow.Tensor_Scalar, reciprocal"),
    "square": (FLOAT32, "pow.Tensor_Scalar(x, 2)"),
    # AT_FORALL_FP32_SET_OPT_DTYPE
    "reduce_sum": (FLOAT32, "sum, and within linalg_vector_norm, softmax, the norms and the losses"),
    "reduce_prod": (FLOAT32, "prod"),
    "cumsum": (FLOAT32, "cumsum"),
    "cumprod": (FLOAT32, "cumprod"),
    "cumlogsumexp": (FLOAT32, "logsumexp, over every prefix"),
    "fft": (FLOAT32, f"fft_fft and the like, {_NONE_IN_LOW_PRECISION} except for powers of two"),
    **_DECOMPOSITIONS,
}

CPU = {
    # lower_precision_fp cast policy
    **_PRODUCTS,
    # fp32 cast policy
    "reduce_prod": (FLOAT32, "prod"),
    "fft": (FLOAT32, "fft_fft and the like"),
    **_DECOMPOSITIONS,
    # Not listed; PyTorch's kernels for them accumulate in float32.
    "reduce_sum": (ROUNDED, "sum, mean"),
    "cumsum": (ROUNDED, "cumsum"),
    "cumprod": (ROUNDED, "cumprod"),
    "cumlogsumexp": (ROUNDED, "logcumsumexp"),
}

LISTS = MappingProxyType(
    {
        device: MappingProxyType({primitive: dtype for primitive, (dtype, _) in lines.items()})
        for device, lines in {"cuda": CUDA, "cpu": CPU}.items()
    }
)
"""The `Dtype` of each primitive, by device."""

AS_TRACED = frozenset(
    (
        "bitcast_convert_type",
        *("call_exported", "call_hi_primitive", "check", "custom_linear_solve", "custom_partitioning", "ffi_call"),
        *("io_callback", "linear_call", "pallas_call", "pure_callback", "reduce", "reduce_window", "remat_opt"),
        *("buffer_callback", "compute_on", "run_state", "scaled_dot", "tpu_custom_call"),
        # On references to arrays, which have one dtype.
        *("accum_grad_in_ref", "addupdate", "empty_ref", "free_ref", "freeze", "get", "new_ref", "pin", "swap"),
        "unpin",
    )
)
"""Primitives that are computed in the dtypes that they are traced with: they read bits, or run a program of their own
that is written for them."""

ARITHMETIC = frozenset(
    (
        *("abs", "acosh", "add", "add_any", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt"),
        *("ceil", "clamp", "cos", "cummax", "cummin", "digamma", "div", "erf", "erfc", "floor", "igamma"),
        *("igamma_grad_a", "igammac", "lgamma", "logistic", "max", "min", "mul", "neg", "one_minus_square"),
        *("polygamma", "polynomial", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"),
        *("reduce_window_sum", "regularized_incomplete_beta", "rem", "round", "scatter-add", "scatter-max"),
        *("scatter-min", "scatter-mul", "scatter-sub", "select_and_scatter_add", "select_n", "sign", "sin", "sort"),
        *("sqrt", "sub", "tanh", "top_k", "zeta"),
    )
)
"""Primitives of JAX that compute or select floating-point numbers, and that neither list names."""

UNLISTED = ARITHMETIC | frozenset(
    (
        # Of other floating-point numbers, complex and random ones.
        *("complex", "conj", "imag", "nextafter", "random_gamma", "real", "reduce_precision"),
        *("approx_top_k", "select_and_gather_add", "select_and_scatter", "stop_gradient"),
        # Comparisons, and operations on integers and bits.
        *("argmax", "argmin", "is_finite", "reduce_and", "reduce_or", "reduce_xor"),
        *("and", "clz", "eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "mulhi", "ne", "not", "or"),
        *("population_count", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor"),
        # Layout, copies and lookups.
        *("broadcast_in_dim", "broadcast_to", "concatenate", "convert_element_type", "copy", "device_put"),
        *("dynamic_slice", "dynamic_update_slice", "gather", "layout_constraint", "name", "optimization_barrier"),
        *("pad", "relayout", "reshape", "reshard", "rev", "scatter", "shard_alike", "sharding_constraint"),
        *("slice", "split", "squeeze", "stack", "tile"),
        *("transpose", "unstack", "with_memory_space_constraint", "xla_metadata_value"),
        # Constants, sizes and random numbers.
        *("after_all", "create_token", "dim_as_value", "dimension_size", "empty", "empty2", "from_edtype", "iota"),
        *("iota_2x32_shape", "lu_pivots_to_permutation", "philox2x32", "philox4x32", "platform_index"),
        *("random_bits", "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap"),
        *("random_wrap", "rng_bit_generator", "rng_uniform", "shape_assertion", "threefry2x32", "threefry4x32"),
        *("to_edtype", "zeros_like"),
        # Between devices.
        *("all_gather", "all_gather_done", "all_gather_invariant", "all_gather_reduced"),
        *("all_gather_reduced_start", "all_gather_start", "all_to_all", "all_to_all_done", "all_to_all_start"),
        *("axis_index", "pbroadcast", "pbroadcast_done", "pbroadcast_dynamic", "pbroadcast_start", "pmax", "pmin"),
        *("ppermute", "ppermute_done", "ppermute_start", "precv", "preduced", "psend", "psum", "psum_done"),
        *("psum_invariant", "psum_invariant_start", "psum_start", "pvary", "ragged_all_to_all", "reduce_scatter"),
        *("reduce_scatter_done", "reduce_scatter_start", "reduced_vary_cast", "reduced_vary_cast_p"),
        *("unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_psum_start"),
        *("unreduced_reduce_scatter", "unreduced_reduce_scatter_start", "vary_unreduced_cast"),
        "vary_unreduced_cast_p",
        # Without a number as a result.
        *("create_linear", "dce_sink", "debug_callback", "debug_print", "inspect_sharding", "tie", "unreachable"),
        # Only within transformations of JAX.
        *("box_get", "box_set", "call_hi_primitive_linearized", "custom_jvp_call_jaxpr", "custom_lin"),
        *("log_extend", "log_read", "new_box", "new_log", "program_order", "stage"),
    )
)
"""Primitives of JAX that neither list names: `ARITHMETIC`, and those that compute no floating-point numbers."""
