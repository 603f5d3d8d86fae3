"""Any `torch.nn.Module` as a pure function: `from_torch`.

model     `from_torch`, and the model that it returns
capture   PyTorch's module to a graph; the only importer of PyTorch
graph     the graph: operations, shapes, dtypes, lines of PyTorch code
interpret evaluates a graph in JAX
ops       the table of operations, a file a family
refusals  errors with the line of PyTorch code
"""

from jaxtrain.torch_import.model import ImportedModel, from_torch

__all__ = ["ImportedModel", "from_torch"]
