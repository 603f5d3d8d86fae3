"""Whether a case shows that the padding row of an embedding is not trained, as `torch.nn.Embedding(padding_idx=…)`.

It does so only where the padding token is an input that the loss depends on: behind a mask, its embedding has no
gradient in any implementation.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity.case import Case
from parity.oracle.in_torch import InFloat64
from parity.sides.torch_side import few_threads, in_dtype, seeded_model, tensor

BATCHES = 3
"""Number of batches; later ones are drawn only while a row is untested."""
NEVER, HIDDEN = "is never an input", "is an input only where the loss does not depend on it"


def padding_rows(model: torch.nn.Module) -> dict[str, int]:
    """Return the padding row of each parameter that has one.

    >>> padding_rows(torch.nn.Sequential(torch.nn.Embedding(5, 2, padding_idx=3), torch.nn.Embedding(5, 2)))
    {'0.weight': 3}
    """
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(module.weight)]: module.padding_idx
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and id(module.weight) in names
    }


def untested_padding(case: Case, seed: int = 0) -> Iterator[str]:
    """Yield a line for each padding row of which the first batches do not show whether it is trained."""
    with seeded_model(case, seed) as model:
        in_dtype(case, model, torch.float64).eval()
        names = {id(p): name for name, p in model.named_parameters()}
        found = dict.fromkeys(padding_rows(model), NEVER)
        for batch in case.batches(seed, BATCHES):
            if not found:
                return
            with few_threads(model), InFloat64(), _Inputs() as inputs:
                total, _ = case.torch_loss(model, {name: tensor(x, "fp64") for name, x in batch.items()})
                total.backward()
            used, trainable = ({names.get(i) for i in ids} & found.keys() for ids in (inputs.used, inputs.trainable))
            found = {name: HIDDEN if name in used else how for name, how in found.items() if name not in trainable}
    for name, how in found.items():
        yield f"the padding row of {name} {how}: whether it is trained is not checked"


class _Inputs(TorchFunctionMode):
    """Finds the weights, by id, whose padding row is an input, and those where the loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.trainable: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.embedding:
            self._embedded(y, *args, **(kwargs or {}))
        return y

    def _embedded(
        self, y: Tensor, indices: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if padding_idx is None or not y.requires_grad:
            return
        is_padding = torch.eq(indices, padding_idx)
        if not is_padding.any():
            return
        self.used.add(id(weight))

        def arrived(grad: Tensor) -> None:
            if grad[is_padding].any():
                self.trainable.add(id(weight))

        y.register_hook(arrived)
