"""The internals of PyTorch that this project depends on, each with a probe.

A capture runs a module under PyTorch's own tracers, and some of what it needs of them has private names alone. They are
all here: other files import them from this one, `jaxtrain doctor` reports what the installed PyTorch lacks, and a test
runs every probe.
"""

from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.program.internals import Internal, has

try:
    from torch._decomp import get_decompositions
    from torch._export import non_strict_utils
    from torch._functorch import apis, eager_transforms
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.export import _trace as export_trace
    from torch.nn import _reduction as reductions
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.conv import _ConvNd as Convolution
    from torch.utils import _pytree as pytree
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    _C, autograd = torch._C, torch.autograd
    AutoDispatchBelowAutograd = _C._AutoDispatchBelowAutograd
    DisableTorchFunction = _C.DisableTorchFunction
    TensorBase = _C.TensorBase
    current_autograd_node: Any = _C._current_autograd_node
    is_functorch_wrapped_tensor = _C._functorch.is_functorch_wrapped_tensor
    peek_interpreter_stack = _C._functorch.peek_interpreter_stack
    engine_run_backward: Any = autograd._engine_run_backward
    next_sequence_number: Any = autograd._get_sequence_nr
    plain_setup_context = autograd.function._SingleLevelFunction.setup_context
    recurrent_kernels: Any = torch._VF
    sample_dirichlet, standard_gamma = torch._sample_dirichlet, torch._standard_gamma
    vmap_internals: Any = torch._vmap_internals
    DirichletFunction: Any = torch.distributions.dirichlet._Dirichlet
except (ImportError, AttributeError) as error:
    raise UserError(
        f"torch {torch.__version__} lacks an internal that the import of modules needs ({error}): "
        "install another version of torch; `jaxtrain doctor` lists what is missing"
    ) from error

__all__ = [
    "ELEMENTWISE_TYPE_PROMOTION_KIND",
    "INTERNALS",
    "AutoDispatchBelowAutograd",
    "BatchNorm",
    "Convolution",
    "DirichletFunction",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "HigherOrderOperator",
    "OpOverload",
    "PythonReferenceAnalysis",
    "TensorBase",
    "TorchDispatchMode",
    "apis",
    "current_autograd_node",
    "disable_current_modes",
    "eager_transforms",
    "elementwise_dtypes",
    "engine_run_backward",
    "export_trace",
    "get_decompositions",
    "is_functorch_wrapped_tensor",
    "next_sequence_number",
    "no_dispatch",
    "non_strict_utils",
    "peek_interpreter_stack",
    "plain_setup_context",
    "pytree",
    "recurrent_kernels",
    "reductions",
    "sample_dirichlet",
    "standard_gamma",
    "sympy_interp",
    "vmap_internals",
]

_CAPTURE, _PARITY = "torch_import.capture", "parity"


def _tensors_are_fake() -> bool:
    with FakeTensorMode():
        return isinstance(torch.ones(2), FakeTensor) and issubclass(FunctionalTensor, torch.Tensor)


def _trees_are_flattened() -> bool:
    leaves, structure = pytree.tree_flatten([1, {"a": 2}])
    keys = pytree.SequenceKey(0).idx, pytree.MappingKey("a").key, pytree.GetAttrKey("b").name
    return pytree.tree_unflatten(leaves, structure) == [1, {"a": 2}] and keys == (0, "a", "b")


def _modes_see_operations() -> bool:
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    with Mode():
        torch.ones(2) + 1
        with disable_current_modes(), no_dispatch(), AutoDispatchBelowAutograd(), DisableTorchFunction():
            torch.ones(2) - 1
    return seen[-1] is torch.ops.aten.add.Tensor and isinstance(seen[-1], OpOverload)


def _engine_is_known() -> bool:
    x = torch.ones(2, requires_grad=True)
    (gradient,) = engine_run_backward(((x * x).sum(),), (torch.ones(()),), False, False, (x,), True, False)
    return gradient.tolist() == [2, 2]


def _functions_are_wrapped() -> bool:
    inside: list[bool] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        inside.append(is_functorch_wrapped_tensor(x) and peek_interpreter_stack() is not None)
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    return inside == [True] and peek_interpreter_stack() is None


def _nodes_are_numbered() -> bool:
    before = next_sequence_number()
    node: Any = torch.ones(2, requires_grad=True).exp().grad_fn
    return node._sequence_nr() >= before == next_sequence_number() - 1 and current_autograd_node() is None


def _dtypes_are_promoted() -> bool:
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    half = torch.ones(1, dtype=torch.float16)
    return elementwise_dtypes(half, type_promotion_kind=kind) == (torch.float32, torch.float16)


def _setup_context_is_plain() -> bool:
    class Function(torch.autograd.Function):
        pass

    return Function.setup_context is plain_setup_context


def _bases_are_known() -> bool:
    convolution, norm = torch.nn.Conv1d(1, 1, 1), torch.nn.BatchNorm1d(1)
    operator = isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    return isinstance(convolution, Convolution) and isinstance(norm, BatchNorm) and operator


def _expressions_are_evaluated() -> bool:
    import sympy

    x = sympy.Symbol("x", integer=True)
    return bool(sympy_interp(PythonReferenceAnalysis, {x: 3}, x + 1) == 4)


INTERNALS: tuple[Internal, ...] = (
    Internal("FakeTensorMode, FakeTensor, FunctionalTensor", _CAPTURE, _tensors_are_fake),
    Internal("torch.utils._pytree", _CAPTURE, _trees_are_flattened),
    Internal("TorchDispatchMode, _disable_current_modes, no_dispatch", _CAPTURE, _modes_see_operations),
    Internal("torch.autograd._engine_run_backward", _CAPTURE, _engine_is_known),
    Internal("torch._C._functorch", _CAPTURE, _functions_are_wrapped),
    Internal("torch._functorch.apis.vmap_impl", _CAPTURE, has(lambda: apis, "vmap_impl", "grad", "grad_and_value")),
    Internal(
        "torch._functorch.eager_transforms",
        _CAPTURE,
        has(
            lambda: eager_transforms,
            *("grad_and_value_impl", "_slice_argnums", "_vjp_with_argnums", "_jvp_with_argnums"),
        ),
    ),
    Internal("torch._vmap_internals._vmap", _CAPTURE, has(lambda: vmap_internals, "_vmap")),
    Internal("torch._export._tensor_min_max", _CAPTURE, has(lambda: non_strict_utils, "_tensor_min_max")),
    Internal("torch.export._trace", _CAPTURE, has(lambda: export_trace, "_export")),
    Internal("torch._prims_common.elementwise_dtypes", _CAPTURE, _dtypes_are_promoted),
    Internal("torch.autograd.function._SingleLevelFunction", _CAPTURE, _setup_context_is_plain),
    Internal("_ConvNd, _BatchNorm, HigherOrderOperator", _CAPTURE, _bases_are_known),
    Internal("torch.distributions.dirichlet._Dirichlet", _CAPTURE, has(lambda: DirichletFunction, "apply")),
    Internal(
        "torch._VF",
        _CAPTURE,
        has(
            lambda: recurrent_kernels,
            *("gru", "lstm", "rnn_tanh", "rnn_relu", "_pack_padded_sequence", "_pad_packed_sequence"),
        ),
    ),
    Internal("torch._sample_dirichlet", _CAPTURE, lambda: sample_dirichlet(torch.ones(2)).shape == (2,)),
    Internal("torch._standard_gamma", _CAPTURE, lambda: standard_gamma(torch.ones(2)).shape == (2,)),
    Internal(
        "torch.nn._reduction", _CAPTURE, lambda: reductions.legacy_get_string(True, True, emit_warning=False) == "mean"
    ),
    Internal("torch.utils._sympy", _CAPTURE, _expressions_are_evaluated),
    Internal("torch._C.TensorBase", _CAPTURE, has(lambda: TensorBase, "requires_grad", "requires_grad_")),
    Internal("_get_sequence_nr, _current_autograd_node", _PARITY, _nodes_are_numbered),
    Internal(
        "torch._decomp.get_decompositions",
        _PARITY,
        lambda: bool(get_decompositions([torch.ops.aten.native_layer_norm])),
    ),
)
