"""The table of operations, one file a family. Importing this package registers all of them."""

from jaxtrain.torch_import.ops import (
    attention,
    convolution,
    create,
    elementwise,
    fft,
    index,
    linalg,
    loss,
    norm,
    pool,
    product,
    random,
    recurrent,
    reduce,
    resample,
    shape,
    sort,
)
from jaxtrain.torch_import.ops.registry import RANDOM as RANDOM
from jaxtrain.torch_import.ops.registry import TABLE as TABLE

__all__ = [
    "attention",
    "convolution",
    "create",
    "elementwise",
    "fft",
    "index",
    "linalg",
    "loss",
    "norm",
    "pool",
    "product",
    "random",
    "recurrent",
    "reduce",
    "resample",
    "shape",
    "sort",
]
