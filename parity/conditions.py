"""What the conventions of PyTorch's functions hang on, and whether a batch ever met it.

Whether ignored labels count says nothing where none is ignored, and a wrong slope at a kink nothing where no input
stands at it. Where that can be mended by other numbers in the batch, they are made.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity.case import Batch, Case
from parity.conventions.operations import Arguments, bound, called
from parity.oracle.in_torch import InFloat64
from parity.torch_side import seeded_model

IGNORED, MASKED, PADDED, TIED = "label ignored", "position masked", "token padded", "tie"


@dataclass(frozen=True)
class Condition:
    """Something that a call of a function may meet: `of` which kind, and how many of its elements do, of its arguments;
    None where the call has no such thing."""

    of: str
    count: Callable[[Arguments], Tensor | int | None]


def _equal(name: str, to: str) -> Callable[[Arguments], Tensor | None]:
    return lambda given: None if given.get(to) is None else (given[name] == given[to]).sum()


def _hidden(name: str, shown: bool) -> Callable[[Arguments], Tensor | None]:
    """How many elements a boolean mask hides; `shown` is what it says of those it does not."""

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
    largest = x == x.amax(dim, keepdim=True)
    return (largest.sum(dim) > 1).sum()


CONDITIONS: Mapping[str, Condition] = {
    "cross_entropy": Condition(IGNORED, _equal("target", "ignore_index")),
    "nll_loss": Condition(IGNORED, _equal("target", "ignore_index")),
    "scaled_dot_product_attention": Condition(MASKED, _hidden("attn_mask", True)),
    "masked_fill": Condition(MASKED, _hidden("mask", False)),
    "embedding": Condition(PADDED, _equal("input", "padding_idx")),
    "relu": Condition("input of relu at 0", _at(0.0)),
    "leaky_relu": Condition("input of leaky_relu at 0", _at(0.0)),
    "abs": Condition("input of abs at 0", _at(0.0)),
    "clamp": Condition("input of clamp at a bound", _at_bounds),
    "hardtanh": Condition("input of hardtanh at a bound", _at_bounds),
    "amax": Condition(f"{TIED} in amax", _tied),
    "max": Condition(f"{TIED} in max", _tied),
    "topk": Condition(f"{TIED} in topk", _tied),
}
"""By the function's name."""


class Watch(TorchFunctionMode):
    """Inside it every call with a condition is looked at: `met`, how many elements met each kind, 0 included.

    `ignore_index`: of the last loss that has one.

    >>> with Watch() as watch:
    ...     _ = torch.relu(torch.tensor([0.0, 1.0])), torch.ones(3).amax(0)
    >>> dict(watch.met)
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


def watched(case: Case, seed: int = 0) -> Watch:
    """PyTorch's loss of one batch, in evaluation mode and in float64, looked at."""
    model = seeded_model(case, seed).double().eval()
    batch = case.batch(seed, case.rows)
    tensors = {
        name: torch.from_numpy(x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x)
        for name, x in batch.items()
    }
    with InFloat64(), Watch() as watch:
        case.torch_loss(model, tensors)
    return watch


def unmet(case: Case, seed: int = 0) -> list[str]:
    """A line for each condition of the case's PyTorch program that its batches do not meet, one for all the kinks.

    >>> from parity.cases import CASES
    >>> unmet(CASES["mlp"]())
    ['no label was ignored', 'no input of relu at 0']
    """
    watch = watched(case, seed)
    never = [kind for kind, count in watch.met.items() if not count]
    data = (IGNORED, MASKED, PADDED)
    kinks = [kind for kind in never if kind not in data]
    lines = [f"no {kind.split()[0]} was {kind.split()[1]}" for kind in never if kind in data]
    lines += [f"{name} is {x.flat[0]} throughout" for name, x in case.batch(seed, case.rows).items() if _constant(x)]
    return [*lines, *([f"no {', no '.join(kinks)}"] if kinks else [])]


def meeting(case: Case, seed: int = 0) -> Iterator[tuple[str, Case]]:
    """Cases whose batches meet what the case's do not, and how: some labels ignored, some rows padded.

    Only such as PyTorch's program computes a finite loss of.
    """
    watch = watched(case, seed)
    batch = case.batch(seed, case.rows)
    for name, x in batch.items():
        if watch.met.get(IGNORED) == 0 and watch.ignore_index is not None and np.issubdtype(x.dtype, np.integer):
            changed = _with(case, name, _every_third(watch.ignore_index))
            if _meets(changed, IGNORED, seed):
                yield f"every third of {name} {watch.ignore_index}", changed
        if _constant(x) and x.ndim > 1 and x.flat[0] == 1:
            changed = _with(case, name, _ragged)
            if _computes(changed, seed):
                yield f"{name} 0 at the ends of rows", changed


def _arguments(name: str, args: Any, kwargs: Any) -> Arguments:
    try:
        return bound(called(name), args, kwargs)
    except (ValueError, TypeError):  # a builtin without a signature, called by position
        return {**dict(zip(("input", "dim" if name != "masked_fill" else "mask"), args, strict=False)), **kwargs}


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


def _ragged(x: np.ndarray) -> np.ndarray:
    """Row i without its last i elements, of half a row at most."""
    length = x.shape[1]
    lengths = length - np.arange(len(x)) % (length // 2 + 1)
    kept = np.arange(length) < lengths[:, None]
    return x * kept.reshape(*kept.shape, *(1,) * (x.ndim - 2)).astype(x.dtype)


def _meets(case: Case, kind: str, seed: int) -> bool:
    return _computes(case, seed) and bool(watched(case, seed).met[kind])


def _computes(case: Case, seed: int) -> bool:
    try:
        watched(case, seed)
    except Exception:  # what the model refuses, in its own way: an index out of range, a negative label
        return False
    return True
