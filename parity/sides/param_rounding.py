"""PyTorch's optimizers on bfloat16 parameters that are updated in float32 and rounded stochastically or compensated.

PyTorch's own optimizers round to nearest. The formulas are those of torchao's stochastic rounding, and of the
compensation of optimi's and torchdistX's optimizers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rounding = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


def stochastically(before: Tensor, after: Tensor, state: dict[str, Any]) -> Tensor:
    """Round float32 `after` to one of the two bfloat16 numbers around it, by chance."""
    generator = state.setdefault("generator", torch.Generator().manual_seed(before.numel()))
    bits = after.view(torch.int32)
    cut = bits & 0xFFFF
    up = torch.randint(0, 2**16, after.shape, dtype=torch.int32, generator=generator) < cut
    return (bits - cut + 0x10000 * up.int()).view(torch.float32).bfloat16()


def with_compensation(before: Tensor, after: Tensor, state: dict[str, Any]) -> Tensor:
    """Round the sum of `before`, its update and what was lost so far to bfloat16; store what is lost now."""
    lost = state.get("lost", torch.zeros_like(before)).float() + (after - before.float())
    rounded = (before.float() + lost).bfloat16()
    state["lost"] = (lost + (before.float() - rounded.float())).bfloat16()
    return rounded


ROUNDINGS: dict[str, Rounding] = {
    "bf16_params_stochastic": stochastically,
    "bf16_params_kahan": with_compensation,
}
"""Roundings by precision."""


def round_after_updates(optimizer: torch.optim.Optimizer, rounding: Rounding) -> None:
    """Let an optimizer of bfloat16 parameters compute in float32, and round them and its moments after each update.

    Args:
      optimizer: The optimizer; hooks that are registered later find what is rounded. Complex parameters are not.
      rounding: How parameters are rounded; moments are rounded to nearest.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if not p.is_complex()]
    states: list[dict[str, Any]] = [{} for _ in params]
    low: list[Tensor] = []

    def convert(p: Tensor, data: Tensor) -> None:
        grad, p.grad = p.grad, None
        p.data = data
        p.grad = None if grad is None else grad.to(data.dtype)
        moments = {name: x for name, x in optimizer.state[p].items() if isinstance(x, Tensor) and x.ndim}
        optimizer.state[p].update({name: x.to(data.dtype) for name, x in moments.items()})

    def widen(*_: Any) -> None:
        low[:] = [p.data for p in params]
        for p in params:
            convert(p, p.data.float())

    def round_params(*_: Any) -> None:
        for p, before, state in zip(params, low, states, strict=True):
            convert(p, rounding(before, p.data, state))

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(round_params)
