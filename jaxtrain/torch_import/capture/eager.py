"""A program of `torch.export`, evaluated by PyTorch's own kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jaxtrain.torch_import.capture.custom_gradients import Call

_REDUCTIONS = ("none", "mean", "sum")


def evaluated(exported: torch.export.ExportedProgram, given: Sequence[Any], calls: Sequence[Call]) -> list[Any]:
    """Return the results of a program, whose operations in place change what it is given.

    Args:
      exported: The program, before its operations in place are replaced.
      given: A value for each input of its signature.
      calls: The calls of `torch.autograd.Function` in it.
    """
    return list(_Evaluation(exported.graph_module, calls).run(*given))


class _Evaluation(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, calls: Sequence[Call]) -> None:
        super().__init__(module)
        self._calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.jaxtrain.custom_function.default:
            number, tensors = args
            return self._calls[number].applied(tensors)
        # The regions of `torch.no_grad` and `torch.autocast`.
        args = tuple(_Evaluation(x, self._calls).run if isinstance(x, torch.fx.GraphModule) else x for x in args)
        return _OURS.get(target, target)(*args, **kwargs)


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


_OURS: dict[Any, Callable[..., Any]] = {
    torch.ops.jaxtrain.ctc_loss.default: _ctc_loss,
    torch.ops.jaxtrain.packed_rnn.default: _packed_rnn,
    torch.ops.jaxtrain.float32.default: _same,
    torch.ops.jaxtrain.begin_float32.default: _same,
    torch.ops.jaxtrain.end_float32.default: _same,
}
"""What our own operations compute."""
