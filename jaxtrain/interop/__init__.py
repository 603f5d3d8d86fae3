"""PyTorch's parameters in and out."""

from jaxtrain.interop.names import (
    AS_IS,
    CONV,
    LAYER,
    LINEAR,
    Layout,
    NameTable,
    TorchParam,
    bias_of_heads,
    leaves,
    linear_after_flatten,
    linear_into_heads,
    linear_out_of_heads,
    unflattened,
)
from jaxtrain.interop.outline import Outline, new_outline, read_outline, write_outline
from jaxtrain.interop.torch_file import StoredTensor, read_torch, write_torch
from jaxtrain.interop.torch_optimizer import KINDS, from_torch
from jaxtrain.interop.torch_run import TorchRun, to_torch, torch_run

__all__ = [
    "AS_IS",
    "CONV",
    "KINDS",
    "LAYER",
    "LINEAR",
    "Layout",
    "NameTable",
    "Outline",
    "StoredTensor",
    "TorchParam",
    "TorchRun",
    "bias_of_heads",
    "from_torch",
    "leaves",
    "linear_after_flatten",
    "linear_into_heads",
    "linear_out_of_heads",
    "new_outline",
    "read_outline",
    "read_torch",
    "to_torch",
    "torch_run",
    "unflattened",
    "write_outline",
    "write_torch",
]
