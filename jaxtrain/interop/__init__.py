"""Conversion of parameters, optimizers, schedulers and checkpoints from and to PyTorch."""

from jaxtrain.interop.metadata import CheckpointMetadata, new_metadata, read_metadata, write_metadata
from jaxtrain.interop.names import (
    AS_IS,
    CONV,
    LAYER,
    LINEAR,
    Layout,
    NameTable,
    TorchParam,
    bias_to_heads,
    leaves,
    linear_after_flatten,
    linear_from_heads,
    linear_to_heads,
    unflatten,
)
from jaxtrain.interop.torch_file import StoredTensor, read_torch, write_torch
from jaxtrain.interop.torch_optimizer import OPTIMIZER_CLASSES, from_torch
from jaxtrain.interop.torch_run import TorchRun, to_torch, torch_run

__all__ = [
    "AS_IS",
    "CONV",
    "LAYER",
    "LINEAR",
    "OPTIMIZER_CLASSES",
    "CheckpointMetadata",
    "Layout",
    "NameTable",
    "StoredTensor",
    "TorchParam",
    "TorchRun",
    "bias_to_heads",
    "from_torch",
    "leaves",
    "linear_after_flatten",
    "linear_from_heads",
    "linear_to_heads",
    "new_metadata",
    "read_metadata",
    "read_torch",
    "to_torch",
    "torch_run",
    "unflatten",
    "write_metadata",
    "write_torch",
]
