"""A pass over a DataLoader with its first batches and its last one.

The batches between are not made: only their indices are drawn, so that the last batch is the one with which the whole
pass would end. Their number and order decide nothing that a recording needs, but how a pass ends does: its last batch
may be smaller, and schedulers, evaluations and checkpoints follow it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

FIRST = 7
"""Batches at the beginning of a pass; with the last one a whole number of windows of 2, 4 and 8 micro-batches."""

MANY = 100_000
"""Batches of a pass that is not shortened, because its end is far."""


def short_pass(loader: Any, on_left_out: Callable[[], None]) -> Iterator[Any]:
    """Iterate over the first batches of a loader and the last one, without its workers.

    Args:
      loader: A `torch.utils.data.DataLoader`.
      on_left_out: Called if batches between are left out.
    """
    if isinstance(loader.dataset, IterableDataset):
        workers, loader.num_workers = loader.num_workers, 0
        try:
            batches = iter(loader._get_iterator())
        finally:
            loader.num_workers = workers
        yield from (batch for _, batch in zip(range(FIRST + 1), batches, strict=False))
        on_left_out()
        return
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    first = FIRST if not hasattr(sampler, "__len__") or len(sampler) <= MANY else len(sampler)
    last: Any = None
    for i, index in enumerate(sampler):
        if i < first:
            yield _fetched(loader, index)
            continue
        if last is not None:
            on_left_out()
        last = [index]
    if last is not None:
        yield _fetched(loader, *last)


def _fetched(loader: Any, index: Any) -> Any:
    """Return the batch of some indices, as `torch.utils.data` documents it."""
    data = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(data[index])
    many = getattr(data, "__getitems__", None)
    return loader.collate_fn(many(index) if many else [data[i] for i in index])
