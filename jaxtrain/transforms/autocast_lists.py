"""The dtype of each operation under autocast: PyTorch's lists for each device in terms of JAX's primitives.

Every line names the PyTorch operations that its primitive stands for, as listed in `aten/src/ATen/autocast_mode.h` for
CUDA and in `aten/src/ATen/autocast_mode.cpp` (TORCH_LIBRARY_IMPL(aten, AutocastCPU)) for the CPU. A primitive without
a line runs in the widest dtype of its inputs, as an unlisted PyTorch operation, whose kernel promotes mixed inputs.
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
        *("cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd"),
        *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
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
    "log": (FLOAT32, "log, log2, log10"),
    "log1p": (FLOAT32, "log1p, and within softplus"),
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
