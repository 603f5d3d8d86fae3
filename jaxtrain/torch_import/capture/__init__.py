"""PyTorch's module to a `Graph`: the only part of `jaxtrain.torch_import` that imports PyTorch.

structure  the module without its weights
copying    copies whose functions refer to the copy
placing    where each tensor that a module reads comes from
tracing    how `torch.export` traces
replaced   attributes of other packages that are replaced for a while
functions  functions that are traced in another form
gradients  gradients inside forward
lifted     constants of the passes of autograd.Function
packed     packed sequences, which stay padded
finite     checks for finite numbers
known_values  tensors computed from constants
questions  values that forward reads, answered as for the example
symbolic   arithmetic on numbers that are read from tensors
bincount   histograms with a fixed number of bins
selections numbers of rows that depend on values
in_float64 code that asks for float32, in float64
attributes what forward assigns besides buffers
carried    attributes that are carried from call to call
numbers    Python numbers that depend on tensors
export     the capture
agreement  the captured program beside the module itself
eager      programs that PyTorch evaluates
reached    what a module reaches besides its parts
restored   a module that is left as it was found
no_grad    regions without gradient
autocast   conversions to float32 and regions without autocast
pretrained models of transformers in folders
causal_lm  language models in folders, without their weights
own_module  the user's module itself, used and set back
packed_rows  how such models take rows of several examples
convert    PyTorch's graph to ours
origins    where operations come from
"""

from jaxtrain.torch_import.capture.agreement import Beside, example_tensors
from jaxtrain.torch_import.capture.carried import CarriedError, started
from jaxtrain.torch_import.capture.causal_lm import (
    adaptable_weights,
    empty_causal_lm,
    logits_of,
    model_tensors,
    token_embeddings,
    write_causal_lm,
)
from jaxtrain.torch_import.capture.export import capture
from jaxtrain.torch_import.capture.packed_rows import packed_call, plain_call
from jaxtrain.torch_import.capture.pretrained import pretrained
from jaxtrain.torch_import.capture.questions import Example
from jaxtrain.torch_import.capture.structure import (
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
