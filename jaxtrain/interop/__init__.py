"""PyTorch's parameters in and out."""

from jaxtrain.interop.names import (
    AS_IS,
    CONV,
    LINEAR,
    NameTable,
    TorchParam,
    bias_of_heads,
    linear_after_flatten,
    linear_into_heads,
    linear_out_of_heads,
)

__all__ = [
    "AS_IS",
    "CONV",
    "LINEAR",
    "NameTable",
    "TorchParam",
    "bias_of_heads",
    "linear_after_flatten",
    "linear_into_heads",
    "linear_out_of_heads",
]
