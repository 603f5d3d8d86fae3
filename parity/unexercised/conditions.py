"""What the conventions of PyTorch's functions depend on, and whether a batch ever met it.

How ignored labels count cannot be seen where no label is ignored, nor a wrong slope at a kink where no input is there.
Where other numbers in the batch can change that, such batches are made.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity.case import Batch, Case
from parity.oracle.in_torch import InFloat64
from parity.sides.calls import Arguments, bound, called
from parity.sides.torch_side import few_threads, in_dtype, seeded_model, tensor
from parity.unexercised.padding import untested_padding

IGNORED, MASKED, TIED = "label ignored", "position masked", "tie"


REFUSALS = (RuntimeError, ValueError, IndexError)
"""What PyTorch raises for a batch that a model cannot take: an index out of range, a negative label. Any other
exception is a bug of the harness and is not caught."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Condition:
    """Something that a call of a function may meet.

    Attributes:
      of: Its kind.
      count: From the arguments of a call to the number of elements that meet it; None if the call cannot meet it.
    """

    of: str
    count: Callable[[Arguments], Tensor | int | None]


def _equal(name: str, to: str) -> Callable[[Arguments], Tensor | None]:
    return lambda given: None if given.get(to) is None else (given[name] == given[to]).sum()


def _hidden(name: str, shown: bool) -> Callable[[Arguments], Tensor | None]:
    """Count the elements that a boolean mask hides; `shown` is the mask's value for the others."""

    def count(given: Arguments) -> Tensor | None:
        mask = given.get(name)
        return (mask != shown).sum() if isinstance(mask, Tensor) and mask.dtype == torch.bool else None

    return count


def _at(*points: float) -> Callable[[Arguments], Tensor]:
    return lambda given: sum((given["input"] == point).sum() for point in points)


def _at_bounds(given: Arguments) -> Any:
    bounds = [given.get(name) for name in ("min", "max", "min_val", "max_val")]
    return sum((given["input"] == bound).sum() for bound in bounds if bound is not None)


def _tied(given: Arguments) -> Tensor:
    x, dim = given["input"], given.get("dim")
    if not isinstance(dim, int):
        x, dim = x.flatten(), 0
    if not x.numel():
        return torch.zeros(())
    largest = x == x.amax(dim, keepdim=True)
    return (largest.sum(dim) > 1).sum()


CONDITIONS: Mapping[str, Condition] = {
    "cross_entropy": Condition(IGNORED, _equal("target", "ignore_index")),
    "nll_loss": Condition(IGNORED, _equal("target", "ignore_index")),
    "scaled_dot_product_attention": Condition(MASKED, _hidden("attn_mask", True)),
    "masked_fill": Condition(MASKED, _hidden("mask", False)),
    "relu": Condition("input of relu at 0", _at(0.0)),
    "leaky_relu": Condition("input of leaky_relu at 0", _at(0.0)),
    "abs": Condition("input of abs at 0", _at(0.0)),
    "clamp": Condition("input of clamp at a bound", _at_bounds),
    "hardtanh": Condition("input of hardtanh at a bound", _at_bounds),
    "amax": Condition(f"{TIED} in amax", _tied),
    "max": Condition(f"{TIED} in max", _tied),
    "topk": Condition(f"{TIED} in topk", _tied),
}
"""By name of the function."""


class ConditionCounter(TorchFunctionMode):
    """Counts, while entered, how often the calls of PyTorch's functions meet their conditions.

    Attributes:
      met: Number of elements by kind of condition, 0 included.
      ignore_index: That of the last loss that has one.

    >>> with ConditionCounter() as counter:
    ...     _ = torch.relu(torch.tensor([0.0, 1.0])), torch.ones(3).amax(0)
    >>> dict(counter.met)
    {'input of relu at 0': 1, 'tie in amax': 1}
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: Counter[str] = Counter()
        self.ignore_index: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if condition := CONDITIONS.get(name):
            given = _arguments(name, args, kwargs)
            count = condition.count(given)
            if count is not None:
                self.met[condition.of] += int(count)
            if condition.of == IGNORED:
                self.ignore_index = given["ignore_index"]
        return func(*args, **kwargs)


def count_conditions(case: Case, seed: int = 0) -> ConditionCounter:
    """Count the conditions of PyTorch's loss of one batch, in evaluation mode and in float64."""
    batch = case.batch(seed, case.rows)
    tensors = {name: tensor(x, "fp64") for name, x in batch.items()}
    with seeded_model(case, seed) as model:
        in_dtype(case, model, torch.float64).eval()
        with few_threads(model), InFloat64(), ConditionCounter() as counter:
            case.torch_loss(model, tensors)
    return counter


def unmet_conditions(case: Case, seed: int = 0) -> list[str]:
    """Return a line for each condition of the PyTorch program that the case's batches do not meet; one for all kinks.

    Padding rows of embeddings are included.

    >>> from parity.cases import CASES
    >>> unmet_conditions(CASES["mlp"]())
    ['no label was ignored', 'no input of relu at 0']
    """
    counter = count_conditions(case, seed)
    never = [kind for kind, count in counter.met.items() if not count]
    data = (IGNORED, MASKED)
    kinks = [kind for kind in never if kind not in data]
    lines = [f"no {kind.split()[0]} was {kind.split()[1]}" for kind in never if kind in data]
    lines += [f"{name} is {x.flat[0]} throughout" for name, x in case.batch(seed, case.rows).items() if _constant(x)]
    return [*lines, *([f"no {', no '.join(kinks)}"] if kinks else []), *untested_padding(case, seed)]


def cases_that_meet(case: Case, seed: int = 0) -> Iterator[tuple[str, Case]]:
    """Yield copies of the case whose batches meet what its own do not: some labels ignored, some rows padded.

    A batch that PyTorch's program refuses is left out; the exception is logged at level INFO.

    Args:
      case: The case.
      seed: Seed of weights and data.

    Yields:
      Tuples (description of the change, changed case).
    """
    counter = count_conditions(case, seed)
    batch = case.batch(seed, case.rows)
    for name, x in batch.items():
        if counter.met.get(IGNORED) == 0 and counter.ignore_index is not None and np.issubdtype(x.dtype, np.integer):
            changed = _with(case, name, _every_third(counter.ignore_index))
            how = f"every third of {name} {counter.ignore_index}"
            now = _counted(changed, how, seed)
            if now is not None and now.met[IGNORED]:
                yield how, changed
        if _may_be_ragged(x):
            changed = _with(case, name, ragged)
            how = f"{name} 0 at the ends of rows"
            if _counted(changed, how, seed) is not None:
                yield how, changed


_POSITIONS = {"masked_fill": ("input", "mask"), "topk": ("input", "k", "dim")}


def _arguments(name: str, args: Any, kwargs: Any) -> Arguments:
    try:
        return bound(called(name), args, kwargs)
    except (ValueError, TypeError):  # a builtin without a signature, called by position
        return {**dict(zip(_POSITIONS.get(name, ("input", "dim")), args, strict=False)), **kwargs}


def _constant(x: np.ndarray) -> bool:
    return x.size > 1 and bool((x == x.flat[0]).all())


def _with(case: Case, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Case:
    def batch(seed: int, rows: int) -> Batch:
        drawn = case.batch(seed, rows)
        return {**drawn, name: change(drawn[name])}

    return replace(case, batch=batch)


def _every_third(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def changed(x: np.ndarray) -> np.ndarray:
        flat = x.copy().reshape(-1)
        flat[::3] = value
        return flat.reshape(x.shape)

    return changed


def _may_be_ragged(x: np.ndarray) -> bool:
    return _constant(x) and x.ndim > 1 and x.flat[0] == 1


def ragged(x: np.ndarray) -> np.ndarray:
    """Return a mask of ones with the last i elements of row i hidden, at most half a row; other arrays as they are."""
    if not _may_be_ragged(x):
        return x
    length = x.shape[1]
    lengths = length - np.arange(len(x)) % (length // 2 + 1)
    shown = np.arange(length) < lengths[:, None]
    return x * shown.reshape(*shown.shape, *(1,) * (x.ndim - 2)).astype(x.dtype)


def _counted(case: Case, how: str, seed: int) -> ConditionCounter | None:
    """The conditions of the changed case; None if PyTorch's program refuses its batch."""
    try:
        return count_conditions(case, seed)
    except REFUSALS as error:
        logger.info("%s, %s: refused by PyTorch: %s: %s", case.name, how, type(error).__name__, error)
        return None
