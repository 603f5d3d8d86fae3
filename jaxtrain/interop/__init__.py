"""Conversion of parameters, optimizers, schedulers and checkpoints from and to PyTorch."""

from jaxtrain.interop.metadata import CheckpointMetadata as CheckpointMetadata
from jaxtrain.interop.metadata import new_metadata as new_metadata
from jaxtrain.interop.metadata import read_metadata as read_metadata
from jaxtrain.interop.metadata import write_metadata as write_metadata
from jaxtrain.interop.names import (
    AS_IS,
    CONV,
    LINEAR,
    NameTable,
    TorchParam,
    bias_to_heads,
    linear_after_flatten,
    linear_from_heads,
    linear_to_heads,
)
from jaxtrain.interop.names import LAYER as LAYER
from jaxtrain.interop.names import OUT_IN as OUT_IN
from jaxtrain.interop.names import Layout as Layout
from jaxtrain.interop.names import StoredLeaf as StoredLeaf
from jaxtrain.interop.names import leaves as leaves
from jaxtrain.interop.names import require_floating as require_floating
from jaxtrain.interop.names import unflatten as unflatten
from jaxtrain.interop.optimizer_state import MOMENTS as MOMENTS
from jaxtrain.interop.torch_file import StoredTensor as StoredTensor
from jaxtrain.interop.torch_file import read_torch, write_torch
from jaxtrain.interop.torch_optimizer import OPTIMIZER_CLASSES as OPTIMIZER_CLASSES
from jaxtrain.interop.torch_optimizer import from_torch
from jaxtrain.interop.torch_optimizer import live_expression as live_expression
from jaxtrain.interop.torch_run import TorchRun, to_torch, torch_run

__all__ = [
    "AS_IS",
    "CONV",
    "LINEAR",
    "NameTable",
    "TorchParam",
    "TorchRun",
    "bias_to_heads",
    "from_torch",
    "linear_after_flatten",
    "linear_from_heads",
    "linear_to_heads",
    "read_torch",
    "to_torch",
    "torch_run",
    "write_torch",
]
