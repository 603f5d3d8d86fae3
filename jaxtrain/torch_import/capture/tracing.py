"""How `torch.export` traces a module: quietly, with whole stack traces, without what a graph would silently lose."""

import contextlib
import inspect
import logging
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from jaxtrain.torch_import.refusals import refusal, source_line


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace as this module describes while entered."""
    norm = _replaced(torch.nn.functional, "instance_norm", _instance_norm)
    with _quiet(), _whole_stack_traces(), _without_python_randomness(), norm:
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warnings and logs that `torch.export` writes about its own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _whole_stack_traces() -> Iterator[None]:
    """Record the lines of functions that `forward` calls as well; PyTorch records those of `forward` only."""

    def from_forward(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return traceback.StackSummary.from_list(frames[first:])

    with _replaced(torch.fx.proxy.TracerBase, "_filter_traceback_frames", from_forward):
        yield


@contextlib.contextmanager
def _without_python_randomness() -> Iterator[None]:
    """Refuse Python's and NumPy's random numbers, which would be drawn once, at the capture."""

    def refusing(name: str) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
            raise refusal(f"{name} would be drawn once, at the import", "use torch.rand or dropout", source_line(stack))

        return draw

    with contextlib.ExitStack() as patches:
        for module, label in ((random, "random"), (np.random, "numpy.random")):
            for name in ("random", "randint", "uniform", "choice", "shuffle", "rand", "randn", "normal"):
                if hasattr(module, name):
                    patches.enter_context(_replaced(module, name, refusing(f"{label}.{name}")))
        yield


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


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
