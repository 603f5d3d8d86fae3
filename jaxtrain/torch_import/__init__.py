"""Any `torch.nn.Module` as a pure function: `from_torch`.

model     `from_torch`, and the model that it returns
capture   PyTorch's module to a graph; the only importer of PyTorch
graph     the graph: operations, shapes, dtypes, lines of PyTorch code
interpret evaluates a graph in JAX
ops       the table of operations, a file a family
refusals  errors with the line of PyTorch code
"""

from jaxtrain.torch_import.graph import Graph as Graph
from jaxtrain.torch_import.graph import Node as Node
from jaxtrain.torch_import.graph import Ref as Ref
from jaxtrain.torch_import.graph import Spec as Spec
from jaxtrain.torch_import.model import ImportedModel, from_torch
from jaxtrain.torch_import.ops import TABLE as TABLE

__all__ = ["ImportedModel", "from_torch"]
