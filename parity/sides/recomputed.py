"""`torch.utils.checkpoint`, whose backward pass would draw other dropout masks than those that PyTorch was given."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint

_REENTRANT = torch.utils.checkpoint.CheckpointFunction


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """Make checkpoints keep what they compute while entered.

    >>> x = torch.ones(3, requires_grad=True)
    >>> calls = []
    >>> with without_recomputation():
    ...     y = torch.utils.checkpoint.checkpoint(lambda x: calls.append(1) or 2 * x, x, use_reentrant=False)
    >>> y.sum().backward()
    >>> len(calls), x.grad.tolist()
    (1, [2.0, 2.0, 2.0])
    """
    with (
        patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _nothing_around),
        patch.object(torch.utils.checkpoint, "CheckpointFunction", _Kept),
    ):
        yield


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Kept:
    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Return the result; that of inputs without a gradient has none in PyTorch."""
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return function(*args)
        return _REENTRANT.apply(function, preserve_rng_state, *args)
