"""A program of `torch.export`, evaluated by PyTorch's own kernels."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from jaxtrain.torch_import.capture.gradients.custom_gradients import Call
from jaxtrain.torch_import.capture.packed import rnn_of_padded
from jaxtrain.torch_import.capture.traceable_functions import ctc_loss_of_tensors
from jaxtrain.torch_import.graph import CUSTOM, GRADIENT
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_internals import FakeTensor, OpOverload, pytree

T = TypeVar("T")


def evaluated(
    exported: torch.export.ExportedProgram, given: Sequence[Any], calls: Sequence[Call], device: torch.device
) -> list[Any]:
    """Return the results of a program, whose operations in place change what it is given.

    Args:
      exported: The program, before its operations in place are replaced.
      given: A value for each input of its signature.
      calls: The calls of `torch.autograd.Function` in it.
      device: Where new tensors are made; the program says the CPU.
    """
    return list(_Evaluation(exported.graph_module, calls, device).run(*given))


class Unevaluated(Exception):  # noqa: N818
    """A node has no value: it depends on random numbers, gradients or tensors without values."""


def value_of(
    node: torch.fx.Node, given: Mapping[torch.fx.Node, Callable[[], torch.Tensor]], root: Any, calls: Sequence[Call]
) -> Any:
    """Return the value of a node of a graph that is being traced, as the function of `untraced`.

    Args:
      node: The node.
      given: Returns the value of a placeholder.
      root: The module with the constants of the graph.
      calls: The calls of `torch.autograd.Function` in it.

    Raises:
      Unevaluated: The value is not known.
    """
    needed = _needed_for(node)
    evaluation = _Evaluation(torch.fx.GraphModule({}, torch.fx.Graph()), calls, torch.device("cpu"))
    values: dict[torch.fx.Node, Any] = {}
    try:
        for x in node.graph.nodes:
            if x in needed:
                values[x] = _value(x, values, given, root, evaluation)
    except Unevaluated:
        raise
    except Exception as error:  # any of PyTorch's
        raise Unevaluated from error
    return values[node]


def untraced(compute: Callable[[], T]) -> T:
    """Return what a function computes with values, while something else is traced.

    PyTorch's modes, devices and dispatch are those of a thread. A value may be asked for inside an operation on a fake
    tensor, where an operation on values would have none as its result, and in a region of `torch.autocast`.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.no_grad()(compute)).result()


def draws(nodes: Sequence[torch.fx.Node]) -> bool:
    """Return whether nodes depend on random numbers."""
    return any(map(_draws, set[torch.fx.Node]().union(*map(_needed_for, nodes))))


def is_of_floats(nodes: Sequence[torch.fx.Node]) -> bool:
    """Return whether nodes depend on inputs of a graph that are floating-point."""
    needed = set[torch.fx.Node]().union(*map(_needed_for, nodes))
    given = [x.meta.get("val") for x in needed if x.op == "placeholder"]
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in given)


def _value(
    node: torch.fx.Node,
    values: Mapping[torch.fx.Node, Any],
    given: Mapping[torch.fx.Node, Callable[[], torch.Tensor]],
    root: Any,
    evaluation: "_Evaluation",
) -> Any:
    if node.op == "placeholder" and node in given:
        # Operations in place change it.
        return given[node]().detach().to(node.meta["val"].dtype, copy=True)
    if node.op == "get_attr":
        constant = getattr(root, str(node.target))
        constant = constant.constant if isinstance(constant, FakeTensor) else constant
        if not isinstance(constant, torch.Tensor):
            raise Unevaluated
        return constant.clone()
    if node.op != "call_function" or str(node.target) == GRADIENT or _draws(node):
        raise Unevaluated
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return evaluation.call_function(node.target, args, kwargs)


def _draws(node: torch.fx.Node) -> bool:
    """Return whether a node draws random numbers; one of dropout in evaluation does not."""
    draws = RANDOM.get(str(node.target))
    return draws is not None and draws(*node.args, **node.kwargs)


def _needed_for(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the nodes that a value depends on, with the operations in place on them before it."""
    needed, pending = set[torch.fx.Node](), [node]
    written: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for x in node.graph.nodes:
        if _is_in_place(x):
            for changed in x.all_input_nodes:
                written.setdefault(_base(changed), []).append(x)
    while pending:
        x = pending.pop()
        if x not in needed:
            needed.add(x)
            pending += [*x.all_input_nodes, *written.get(_base(x), ())]
    return needed


def _is_in_place(node: torch.fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def writes(graph: torch.fx.Graph) -> int:
    """Return how many operations in place a graph has."""
    return sum(map(_is_in_place, graph.nodes))


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node whose memory a node may be a view of."""
    while isinstance(node.target, OpOverload) and node.all_input_nodes:
        returned = node.target._schema.returns
        if not returned or returned[0].alias_info is None:
            break
        node = node.all_input_nodes[0]
    return node


class _Evaluation(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, calls: Sequence[Call], device: torch.device) -> None:
        super().__init__(module)
        self._calls, self._device = calls, device
        self._differentiated = {
            x for node in module.graph.nodes if str(node.target) == GRADIENT for x in pytree.tree_leaves(node.args[1])
        }

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        # What leaves a region without gradient is detached, and may be a leaf in it.
        if n in self._differentiated and not result.requires_grad:
            result = result.detach().requires_grad_()
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) == CUSTOM:
            number, tensors = args
            return self._calls[number].applied(tensors)
        # The regions of `torch.no_grad` and `torch.autocast`.
        args = tuple(self._region(x).run if isinstance(x, torch.fx.GraphModule) else x for x in args)
        if self._device.type != "cpu":
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: self._device, (args, kwargs))
        return _OURS.get(str(target), target)(*args, **kwargs)

    def _region(self, module: torch.fx.GraphModule) -> "_Evaluation":
        return _Evaluation(module, self._calls, self._device)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


_OURS: dict[str, Callable[..., Any]] = {
    "jaxtrain.ctc_loss.default": ctc_loss_of_tensors,
    "jaxtrain.packed_rnn.default": rnn_of_padded,
    "jaxtrain.float32.default": _same,
    "jaxtrain.begin_float32.default": _same,
    "jaxtrain.end_float32.default": _same,
}
"""What our own operations compute."""
