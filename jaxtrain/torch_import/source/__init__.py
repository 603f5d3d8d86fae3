"""The source of an imported model: one function for each class of modules, in JAX.

emit          the file and its proof
file          the text around the functions
class_functions one function a class
signatures    what functions take and return, types, docstrings
layer_loops   layers that repeat, as a scan
custom        `torch.autograd.Function`
scope         the tensors that a function's code can read
identities    operations that do nothing
identifiers   names of functions, arguments and tensors
body          statements of a function, with PyTorch's names
call_tree     operations by the calls of modules they belong to
batch_norm_call BatchNorm as one call
writing       the expression of one operation
templates     how everyday operations are written
expressions   Python expressions
constants     constant tensors
ruff_format   the file as `ruff format` lays it out
pytorch_code  names in the user's PyTorch code
compare       equality of jaxprs
runtime       what the files contain besides the modules' functions
"""

from jaxtrain.torch_import.source.call_tree import calls_in
from jaxtrain.torch_import.source.emit import Pass, source_of
from jaxtrain.torch_import.source.identities import without_identities

__all__ = ["Pass", "calls_in", "source_of", "without_identities"]
