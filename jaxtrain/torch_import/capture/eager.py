"""A program of `torch.export`, evaluated by PyTorch's own kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from jaxtrain.torch_import.capture.custom_gradients import Call
from jaxtrain.torch_import.graph import CUSTOM, GRADIENT

_REDUCTIONS = ("none", "mean", "sum")


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


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return torch.nn.functional.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, _REDUCTIONS[reduction], zero_infinity
    )


def _packed_rnn(
    kind: str, data: torch.Tensor, lengths: torch.Tensor, hx: Any, params: Any, *options: Any
) -> list[torch.Tensor]:
    """Pack the padded sequences [time * N, …], which `jaxtrain.torch_import.capture.packed` leaves padded."""
    padded = data.unflatten(0, (-1, lengths.shape[0]))
    packed, sizes = torch._VF._pack_padded_sequence(padded, lengths, False)
    state = hx if kind == "lstm" else hx[0]
    y, *states = getattr(torch._VF, kind)(packed, sizes, state, params, *options)
    y, _ = torch._VF._pad_packed_sequence(y, sizes, False, 0.0, padded.shape[0])
    return [y.flatten(0, 1), *states]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


_OURS: dict[str, Callable[..., Any]] = {
    "jaxtrain.ctc_loss.default": _ctc_loss,
    "jaxtrain.packed_rnn.default": _packed_rnn,
    "jaxtrain.float32.default": _same,
    "jaxtrain.begin_float32.default": _same,
    "jaxtrain.end_float32.default": _same,
}
"""What our own operations compute."""
