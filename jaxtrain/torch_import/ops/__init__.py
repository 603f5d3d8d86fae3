"""The table of operations, one file a family. Importing this package registers all of them."""

from jaxtrain.torch_import.ops import (
    assumed,
    create,
    elementwise,
    fft,
    index,
    int64,
    random,
    reduce,
    scatter,
    shape,
    sort,
    special,
)
from jaxtrain.torch_import.ops.matrices import decomposition, linalg, product, solve
from jaxtrain.torch_import.ops.network import (
    attention,
    convolution,
    ctc,
    loss,
    max_pool,
    norm,
    pool,
    recurrent,
    resample,
    sampling,
)
from jaxtrain.torch_import.ops.table import RANDOM as RANDOM
from jaxtrain.torch_import.ops.table import TABLE as TABLE

__all__ = [
    "assumed",
    "attention",
    "convolution",
    "create",
    "ctc",
    "decomposition",
    "elementwise",
    "fft",
    "index",
    "int64",
    "linalg",
    "loss",
    "max_pool",
    "norm",
    "pool",
    "product",
    "random",
    "recurrent",
    "reduce",
    "resample",
    "sampling",
    "scatter",
    "shape",
    "solve",
    "sort",
    "special",
]
