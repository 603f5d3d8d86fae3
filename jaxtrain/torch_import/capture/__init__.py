"""PyTorch's module to a `Graph`: the only part of `jaxtrain.torch_import` that imports PyTorch.

structure  the module without its weights
tracing    how `torch.export` traces
export     the capture
no_grad    regions without gradient
convert    PyTorch's graph to ours
origins    where operations come from
"""

from jaxtrain.torch_import.capture.convert import Captured
from jaxtrain.torch_import.capture.export import capture
from jaxtrain.torch_import.capture.structure import Structure, as_array, filled, structure_of

__all__ = ["Captured", "Structure", "as_array", "capture", "filled", "structure_of"]
