"""Functions of `torch.nn.functional` in a form that a graph can contain."""

import math
from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("jaxtrain", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, int reduction, "
    "bool zero_infinity) -> Tensor"
)
_REDUCTIONS = ("none", "mean", "sum")


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.instance_norm` as ATen computes it, a batch norm over (examples × channels).

    Of the operation itself a graph does not tell that it writes to the running statistics.

    References:
      `instance_norm` in PyTorch's `aten/src/ATen/native/Normalization.cpp`.
    """
    if running_mean is None or running_var is None or not use_input_stats:
        return torch.instance_norm(
            input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, torch.backends.cudnn.enabled
        )
    rows, channels = input.shape[:2]
    mean, var = running_mean.repeat(rows), running_var.repeat(rows)
    scale, shift = (None if x is None else x.repeat(rows) for x in (weight, bias))
    merged = input.reshape(1, rows * channels, *input.shape[2:])
    y = torch.nn.functional.batch_norm(merged, mean, var, scale, shift, True, momentum, eps)
    running_mean.copy_(mean.view(rows, channels).mean(0))
    running_var.copy_(var.view(rows, channels).mean(0))
    return y.view(input.shape)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`F.gaussian_nll_loss` without its check that no variance is negative."""
    variance = var * torch.ones_like(input) if isinstance(var, float) else var
    if variance.shape != input.shape and input.shape[:-1] == variance.shape:
        variance = variance.unsqueeze(-1)
    # The bound has no gradient.
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@torch.library.register_fake("jaxtrain::ctc_loss")
def _shape_of_ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return log_probs.new_empty(() if reduction else log_probs.shape[1:-1])


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`F.ctc_loss` as an operation of our own: PyTorch's computes the shape of a result from values."""
    steps, labels = (torch.as_tensor(x, dtype=torch.int64) for x in (input_lengths, target_lengths))
    number = _REDUCTIONS.index(reduction)
    loss: torch.Tensor = torch.ops.jaxtrain.ctc_loss(log_probs, targets, steps, labels, blank, number, zero_infinity)
    return loss


FUNCTIONS = {"instance_norm": _instance_norm, "gaussian_nll_loss": _gaussian_nll_loss, "ctc_loss": _ctc_loss}
"""Replacements while a module is traced, by name."""
