"""What autocast changes in a module besides the dtypes of operations, which a float32 graph does not show.

In float32 `x.to(torch.float32)` does nothing, and neither does a region under `torch.autocast(enabled=False)`. Under
autocast the one converts a low-precision x, and in the other products are computed as they are written. A run without
values under PyTorch's autocast tells where, by lines of code; the export marks these calls with operations of our own.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from jaxtrain.torch_import.capture.replaced import replaced
from jaxtrain.torch_import.graph import Node, Ref, references
from jaxtrain.torch_import.refusals import is_internal
from jaxtrain.torch_import.rewrites.layers import mapped
from jaxtrain.torch_internals import OpOverload, pytree

_LIBRARY = torch.library.Library("jaxtrain", "FRAGMENT")
_LIBRARY.define("float32(Tensor x) -> Tensor", tags=[torch.Tag.pointwise])
_LIBRARY.define("begin_float32(Tensor x) -> Tensor")
_LIBRARY.define("end_float32(Tensor x) -> Tensor")
BEGIN, END = "jaxtrain.begin_float32.default", "jaxtrain.end_float32.default"
MARKS = frozenset({BEGIN, END})
_CASTS = frozenset({"to", "float", "type", "type_as"})
_TOLD_DTYPE = frozenset(
    {"softmax", "log_softmax", "softmin", "sum", "mean", "prod", "cumsum", "cumprod", "vector_norm"}
)
"""Functions that convert their first argument to the dtype that they are given."""
_PRODUCTS = frozenset(
    {
        *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "einsum", "tensordot"),
        *("addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "vecdot"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        "scaled_dot_product_attention",
    }
)
"""Functions of autocast's list for low precision (`AT_FORALL_LOWER_PRECISION_FP`), which work on new tensors."""

Call = tuple[str, int, str, int]
"""File, line, function of PyTorch, and how many calls of it the line made before."""


@torch.library.register_fake("jaxtrain::float32")
@torch.library.register_fake("jaxtrain::begin_float32")
@torch.library.register_fake("jaxtrain::end_float32")
def _same(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Calls(NamedTuple):
    """Calls of PyTorch's functions.

    Attributes:
      conversions: Those that convert a low-precision tensor to float32 under autocast.
      products: Those that run with autocast disabled.
    """

    conversions: frozenset[Call]
    products: frozenset[Call]

    def union(self, other: "Calls") -> "Calls":
        """Return the calls of both."""
        return Calls(self.conversions | other.conversions, self.products | other.products)


def calls_under_autocast(run: Callable[[], Any]) -> Calls:
    """Return the calls that a module's forward pass makes.

    Args:
      run: The pass, on tensors without values. Where it fails, the calls before are returned: the export tells why.
    """
    with _Observed() as found, contextlib.suppress(Exception), _enabled():
        run()
    return Calls(frozenset(found.conversions), frozenset(found.products))


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    """Enable autocast, also for "cuda", which modules name in regions, as if there were a GPU."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    no_gpu = replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    try:
        with no_gpu, replaced(torch.cuda, "is_bf16_supported", lambda: True), torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


class _Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def _call(self, func: Any) -> Call | None:
        """Return the call that is being made; None for one that no code of a user or a library of models makes."""
        frame = sys._getframe(2)
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return None
        place = (frame.f_code.co_filename, frame.f_lineno, _name(func))
        self._counts[place] += 1
        return (*place, self._counts[place])


class _Observed(_Mode):
    def __init__(self) -> None:
        super().__init__()
        self.conversions: set[Call] = set()
        self.products: set[Call] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call, result = self._call(func), func(*args, **kwargs)
        if call is None:
            return result
        if _converts(func, kwargs) and _dtype(args[:1]) == torch.bfloat16 and _dtype([result]) == torch.float32:
            self.conversions.add(call)
        disabled = not (torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled("cuda"))
        if _name(func) in _PRODUCTS and disabled:
            self.products.add(call)
        return result


def marked(calls: Calls | None) -> AbstractContextManager[Any]:
    """Mark calls with operations while entered."""
    return contextlib.nullcontext() if calls is None or not any(calls) else _Marked(calls)


class _Marked(_Mode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._found = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._call(func)
        if call in self._found.conversions and _dtype(args[:1]) == torch.float32:
            args = (torch.ops.jaxtrain.float32(args[0]), *args[1:])
        if call not in self._found.products:
            return func(*args, **kwargs)
        args, kwargs = _marked((args, kwargs), torch.ops.jaxtrain.begin_float32)
        return _marked(func(*args, **kwargs), torch.ops.jaxtrain.end_float32)


def _marked(values: Any, mark: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    is_float = lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.float32  # noqa: E731
    return pytree.tree_map(lambda x: mark(x) if is_float(x) else x, values)


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _converts(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call converts its first argument to a dtype."""
    return _name(func) in _CASTS or (_name(func) in _TOLD_DTYPE and kwargs.get("dtype") is not None)


def _dtype(values: Sequence[Any]) -> torch.dtype | None:
    return next((x.dtype for x in values if isinstance(x, torch.Tensor)), None)


def without_marks_of_changed(exported: torch.export.ExportedProgram) -> None:
    """Remove the marks of conversions whose result is changed in place: in float32 that is the argument itself."""
    for module in exported.graph_module.modules():
        for node in list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
                # A list of tensors in `torch._foreach_…`.
                changed = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                for mark in map(_viewed, changed):
                    if mark.target is torch.ops.jaxtrain.float32.default:
                        mark.replace_all_uses_with(mark.all_input_nodes[0])


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """Return the value that a node is a view of, through conversions."""
    while isinstance(node.target, OpOverload) and node.args:
        returned = node.target._schema.returns
        if not returned or returned[0].alias_info is None or not isinstance(node.args[0], torch.fx.Node):
            break
        node = node.args[0]
    return node


def unmarked(nodes: Sequence[Node]) -> tuple[list[Node], dict[str, str]]:
    """Return the operations without the marks of products, which set `in_float32` of the operations between them.

    Args:
      nodes: Operations in their order.

    Returns:
      A tuple (operations, name of the marked value by the mark's name).
    """
    values: dict[str, str] = {}
    inside: set[str] = set()
    found = []
    for node in nodes:
        given = set(references((node.args, node.kwargs)))
        if node.op in MARKS:
            (name,) = given
            values[node.name] = values.get(name, name)
            inside |= {node.name} if node.op == BEGIN else set()
            continue
        if given & inside:
            inside.add(node.name)
        args, kwargs = mapped((node.args, node.kwargs), lambda ref: Ref(values.get(ref.name, ref.name)))
        found.append(replace(node, args=args, kwargs=kwargs, in_float32=bool(given & inside)))
    return found, values
