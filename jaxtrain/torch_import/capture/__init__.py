"""PyTorch's module to a `Graph`: the only part of `jaxtrain.torch_import` that imports PyTorch.

torch_export         the capture
tracing              how `torch.export` traces
traceable_functions  functions that are traced in another form
replaced             attributes of other packages that are replaced for a while
module               the user's module: its structure, its copies, what its calls change
values               numbers, conditions and sizes that depend on values
gradients            gradients inside forward, functions with gradients of their own
autocast_regions     conversions to float32 and regions without autocast
in_float64           code that asks for float32, in float64
packed               packed sequences, which stay padded
folders              models of transformers in folders
convert              PyTorch's graph to ours
origins              where operations come from
eager                programs that PyTorch evaluates
agreement            the captured program beside the module itself
"""

from jaxtrain.torch_import.capture.agreement import Beside, example_tensors
from jaxtrain.torch_import.capture.folders.empty_causal_lm import (
    adaptable_weights,
    empty_causal_lm,
    logits_of,
    model_tensors,
    token_embeddings,
    write_causal_lm,
)
from jaxtrain.torch_import.capture.folders.folder_model import pretrained
from jaxtrain.torch_import.capture.folders.packed_rows import packed_call, plain_call
from jaxtrain.torch_import.capture.module.carried import CarriedError, started
from jaxtrain.torch_import.capture.module.structure import (
    Structure,
    as_array,
    as_arrays,
    as_constant,
    dtype_name,
    filled,
    is_lazy,
    materialized,
    persistent_buffers,
    shape_of,
    structure_of,
)
from jaxtrain.torch_import.capture.torch_export import capture
from jaxtrain.torch_import.capture.values.questions import Example

__all__ = [
    "Beside",
    "CarriedError",
    "Example",
    "Structure",
    "adaptable_weights",
    "as_array",
    "as_arrays",
    "as_constant",
    "capture",
    "dtype_name",
    "empty_causal_lm",
    "example_tensors",
    "filled",
    "is_lazy",
    "logits_of",
    "materialized",
    "model_tensors",
    "packed_call",
    "persistent_buffers",
    "plain_call",
    "pretrained",
    "shape_of",
    "started",
    "structure_of",
    "token_embeddings",
    "write_causal_lm",
]
