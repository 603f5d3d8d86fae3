"""Watch the selections of a PyTorch program."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from jaxtrain.torch_internals import pytree
from parity.case import Batch, Case
from parity.oracle.in_torch import InFloat64
from parity.sides.torch_side import few_threads, in_dtype, seeded_model, tensor
from parity.source import PARITY
from parity.unexercised.selections import Selections, caller

TORCH = f"{Path(torch.__file__).parent}/"
PASSED = (f"{PARITY}/oracle/", __file__, f"{TORCH}overrides.py", f"{TORCH}utils/_device.py")

Conditions = Iterator[tuple[str, Tensor]]


def watch_torch(case: Case, batch: Batch, seed: int, selections: Selections) -> None:
    """Record the selections in building the model and in the loss of a batch, in evaluation mode and in float64."""
    with _Watch(selections), seeded_model(case, seed) as model:
        in_dtype(case, model, torch.float64).eval()
        with few_threads(model), InFloat64():
            case.torch_loss(model, {name: tensor(x, "fp64") for name, x in batch.items()})


class _Watch(TorchFunctionMode):
    """Records the selections whose conditions depend on no parameter."""

    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self.selections = selections
        self.trained = WeakIdKeyDictionary()  # the tensors that depend on parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in SELECTIONS and (at := caller(sys._getframe(1), PASSED)) and not at[0].startswith(TORCH):
            for what, condition in SELECTIONS[name](*args, **kwargs):
                if not self._is_trained((args, kwargs) if name in COMPARED else condition) and condition.numel():
                    self.selections.add(what, *at, condition.numpy(force=True))
        results = func(*args, **kwargs)
        if self._is_trained((args, kwargs)):
            for x in pytree.tree_leaves((results, args[:1] if func is Tensor.__setitem__ else None)):
                if isinstance(x, Tensor):
                    self.trained[x] = True
        return results

    def _is_trained(self, values: Any) -> bool:
        return any(isinstance(x, Tensor) and (x.requires_grad or x in self.trained) for x in pytree.tree_leaves(values))


def _where(condition: Tensor, *values: Any) -> Conditions:
    if values:  # without them it returns indices
        yield "condition of where", condition


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Conditions:
    yield "mask of masked_fill", mask


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Conditions:
    if min is not None:
        yield "x < min of clamp", x < min
    if max is not None:
        yield "x > max of clamp", x > max


def _minimum(x: Tensor, y: Any = None, **options: Any) -> Conditions:
    if isinstance(y, Tensor):  # otherwise a reduction
        yield "x < y of minimum", x < y


def _maximum(x: Tensor, y: Any = None, **options: Any) -> Conditions:
    if isinstance(y, Tensor):
        yield "x > y of maximum", x > y


SELECTIONS: Mapping[str, Callable[..., Conditions]] = {
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clip": _clamp,
    "min": _minimum,
    "minimum": _minimum,
    "max": _maximum,
    "maximum": _maximum,
}
COMPARED = SELECTIONS.keys() - {"where", "masked_fill"}
"""Functions whose condition compares their arguments."""
