"""A program of `torch.export`, evaluated by PyTorch's own kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from jaxtrain.torch_import.capture.custom_gradients import Call
from jaxtrain.torch_import.capture.functions import ctc_loss_of_tensors
from jaxtrain.torch_import.capture.packed import rnn_of_padded
from jaxtrain.torch_import.graph import CUSTOM, GRADIENT


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


class _Evaluation(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, calls: Sequence[Call], device: torch.device) -> None:
        super().__init__(module)
        self._calls, self._device = calls, device
        self._differentiated = {
            x for node in module.graph.nodes if str(node.target) == GRADIENT for x in _pytree.tree_leaves(node.args[1])
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
            args, kwargs = _pytree.tree_map_only(torch.device, lambda _: self._device, (args, kwargs))
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
