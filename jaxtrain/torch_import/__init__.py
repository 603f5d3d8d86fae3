"""Any `torch.nn.Module` as a pure function: `from_torch`.

model     `from_torch`, and the model that it returns
graph_model a captured module as a function of its parameters
saved     the model as a folder, and `load_imported`
imported_task the task of a training run
causal_lm a language model in a folder, for fine-tuning
capture   PyTorch's module to a graph; the only importer of PyTorch
graph     the graph: operations, shapes, dtypes, lines of PyTorch code
rewrites  the same graph in a form that is faster to compute
linear_weights  finds the weights of linear layers
interpret evaluates a graph in JAX
nested_gradients gradients within a graph
source    writes a graph as readable JAX
functional PyTorch's operations by name, for such source
ops       the table of operations, a file a family
refusals  errors with the line of PyTorch code
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jaxtrain.torch_import.causal_lm import CausalLM as CausalLM
from jaxtrain.torch_import.causal_lm import load_causal_lm as load_causal_lm
from jaxtrain.torch_import.causal_lm import open_causal_lm as open_causal_lm
from jaxtrain.torch_import.graph import RECOMPUTED as RECOMPUTED
from jaxtrain.torch_import.graph import Graph as Graph
from jaxtrain.torch_import.graph import Line as Line
from jaxtrain.torch_import.graph import Node as Node
from jaxtrain.torch_import.graph import Ref as Ref
from jaxtrain.torch_import.graph import Spec as Spec
from jaxtrain.torch_import.graph_model import refuse_beyond_int32 as refuse_beyond_int32
from jaxtrain.torch_import.interpret import pytorchs_promotion as pytorchs_promotion
from jaxtrain.torch_import.model import ImportedModel, from_torch
from jaxtrain.torch_import.ops import TABLE as TABLE
from jaxtrain.torch_import.refusals import is_internal as is_internal
from jaxtrain.torch_import.saved import SavedModel, load_imported


def lent(*modules: Any) -> AbstractContextManager[None]:
    """Return `capture.module.own_module.lent` of modules, whose import needs PyTorch."""
    from jaxtrain.torch_import.capture.module import own_module

    return own_module.lent(*modules)


def tensors_of(module: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return `capture.module.own_module.tensors_of` of a module, whose import needs PyTorch."""
    from jaxtrain.torch_import.capture.module import own_module

    return own_module.tensors_of(module, names)


def set_tensors(module: Any, tensors: Mapping[str, Any]) -> None:
    """Call `capture.module.own_module.set_tensors`, whose import needs PyTorch."""
    from jaxtrain.torch_import.capture.module import own_module

    own_module.set_tensors(module, tensors)


def convert_tensors(module: Any, to: Callable[[Any], Any], state: Iterable[str] = ()) -> None:
    """Call `capture.module.own_module.convert_tensors`, whose import needs PyTorch."""
    from jaxtrain.torch_import.capture.module import own_module

    own_module.convert_tensors(module, to, state)


__all__ = ["ImportedModel", "SavedModel", "from_torch", "load_imported"]
