"""Functions of PyTorch in a form that a graph can contain."""

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jaxtrain.torch_import.capture.gradients.inner_gradients import GRADIENTS
from jaxtrain.torch_import.capture.packed import PACKED
from jaxtrain.torch_import.refusals import is_internal, refusal, source_line
from jaxtrain.torch_internals import (
    BatchNorm,
    DirichletFunction,
    FakeTensor,
    reductions,
    sample_dirichlet,
    standard_gamma,
)

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


def _multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`F.multi_margin_loss` with the gradient of its kernel, 0 at the margin: that of its decomposition is 1.

    References:
      `multi_margin_loss_backward_kernel` in PyTorch's `aten/src/ATen/native/LossMultiMargin.cpp`.
    """
    if size_average is not None or reduce is not None:
        reduction = reductions.legacy_get_string(size_average, reduce)
    scores, labels = torch.atleast_2d(input), torch.atleast_1d(target)
    distance = margin - scores.gather(1, labels[:, None]) + scores
    others = torch.arange(scores.shape[1], device=input.device) != labels[:, None]
    terms = torch.where((distance > 0) & others, distance**p, 0)
    if weight is not None:
        terms = terms * weight[labels][:, None]
    loss = (terms.sum(1) / scores.shape[1]).reshape(input.shape[:-1])
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@torch.library.register_fake("jaxtrain::ctc_loss")
def _shape_of_ctc_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    *_, reduction, _ = args
    return log_probs.new_empty(() if reduction else log_probs.shape[1:-1])


def ctc_loss_of_tensors(*args: Any) -> torch.Tensor:
    """Compute `ctc_loss` by PyTorch's operation."""
    log_probs, targets, steps, labels, blank, reduction, zero_infinity = args
    return torch.nn.functional.ctc_loss(log_probs, targets, steps, labels, blank, _REDUCTIONS[reduction], zero_infinity)


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


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """`_detect_is_causal_mask` without a look at the mask, which is applied as it is."""
    return is_causal is True


def _fill_diagonal_(self: torch.Tensor, value: float, wrap: bool = False) -> torch.Tensor:
    """`Tensor.fill_diagonal_` as an assignment to a view."""
    if wrap:
        raise refusal("fill_diagonal_ with wrap=True", "assign to a diagonal")
    diagonal = self
    while diagonal.ndim > 1:
        diagonal = diagonal.diagonal()
    diagonal.fill_(value)
    return self


def _converted(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`Module._apply`, as by `self.head.to(dtype)` in `forward`, where it converts nothing."""
    tensors = [*self.parameters(recurse), *self.buffers(recurse)]
    if any((x.dtype, x.device) != (y.dtype, y.device) for x, y in zip(tensors, map(fn, tensors), strict=True)):
        raise refusal("a module is converted to another dtype or device", "convert it before the import")
    return self


def _batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """`_BatchNorm.forward`, with a mean of the statistics of all batches (momentum=None) as tensors."""
    if self.momentum is not None or not (self.training and self.track_running_stats):
        plain: torch.Tensor = _forward(self, input)
        return plain
    self._check_input_dim(input)
    mean, var = self.running_mean.clone(), self.running_var.clone()
    y = torch.nn.functional.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    self.num_batches_tracked.add_(1)
    share = 1.0 / self.num_batches_tracked.double()
    self.running_mean.copy_((1 - share) * self.running_mean + share * mean)
    self.running_var.copy_((1 - share) * self.running_var + share * var)
    return y


_forward = BatchNorm.forward


def _item(self: torch.Tensor) -> Any:
    """`Tensor.item`; a floating-point number without a value as a tensor, with which operations compute the same."""
    if isinstance(self, FakeTensor) and self.constant is None and self.is_floating_point() and self.numel() == 1:
        return self.detach().reshape(())
    return _number(self)


_number = torch.Tensor.item


def _as_strided(self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """`Tensor.as_strided`, called by the user, of the tensor with its axes in the order of its storage."""
    if not is_internal(sys._getframe(1).f_code.co_filename):
        self = self.permute(sorted(range(self.ndim), key=lambda i: (-self.stride()[i], -self.shape[i])))
    return _strided(self, size, stride, storage_offset)


_strided: Callable[..., torch.Tensor] = torch.Tensor.as_strided


def _register_hook(self: torch.Tensor, hook: Any) -> Any:
    stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
    raise refusal(
        "Tensor.register_hook inside forward, which a graph loses",
        "change the gradient by an autograd.Function",
        source_line(stack),
    )


def _dirichlet(concentration: torch.Tensor) -> torch.Tensor:
    """`_Dirichlet.apply`, of `Beta` and `Dirichlet`, without a gradient."""
    if torch.is_grad_enabled() and concentration.requires_grad:
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
        raise refusal(
            "rsample of Beta or Dirichlet with a gradient", "use sample(), or Kumaraswamy", source_line(stack)
        )
    return sample_dirichlet(concentration)


def _gamma(self: torch.distributions.Gamma, sample_shape: Any = ()) -> torch.Tensor:
    """`Gamma.rsample`, whose bound changes no tensor in place."""
    shape = self._extended_shape(sample_shape)
    value = standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
    # The bound has no gradient.
    return value + (value.clamp(min=torch.finfo(value.dtype).tiny) - value).detach()


class _Data:
    """`Tensor.data`: the tensor itself without its gradient, and an assignment to it."""

    def __get__(self, tensor: torch.Tensor | None, owner: Any) -> Any:
        return self if tensor is None else tensor.detach()

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise refusal("the data of a tensor is replaced by another shape or dtype", "make a new tensor")
        tensor.detach().copy_(value.detach())


FUNCTIONS: tuple[tuple[Any, str, Any], ...] = (
    (torch.nn.functional, "instance_norm", _instance_norm),
    (torch.nn.functional, "gaussian_nll_loss", _gaussian_nll_loss),
    (torch.nn.functional, "multi_margin_loss", _multi_margin_loss),
    (torch.nn.functional, "ctc_loss", _ctc_loss),
    (torch.nn.modules.transformer, "_detect_is_causal_mask", _is_causal),
    (torch.nn.Module, "_apply", _converted),
    (torch.Tensor, "fill_diagonal_", _fill_diagonal_),
    (torch.Tensor, "as_strided", _as_strided),
    (torch.Tensor, "item", _item),
    (torch.Tensor, "data", _Data()),
    (torch.Tensor, "register_hook", _register_hook),
    (BatchNorm, "forward", _batch_norm),
    (torch.distributions.Gamma, "rsample", _gamma),
    (DirichletFunction, "apply", staticmethod(_dirichlet)),
    (torch.nn.modules.rnn, "_VF", PACKED),
    (torch.nn.utils.rnn, "_VF", PACKED),
    *GRADIENTS,
)
"""Replacements while a module is traced: owner, name and value."""
