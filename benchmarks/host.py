"""Host work: reading examples into batches with each framework's loader."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.engines import Engine
from benchmarks.job import Job

INPUTS: Mapping[str, str] = {"input-text": "gpt-stdlib", "input-images": "digits-cnn"}
"""Workload -> recipe whose training examples are read, shuffled, in its batch size."""
ENGINES = ("jax", "torch_eager")
BATCHES = 100
"""Batches per step: many, so that those prefetched during other engines' turns hardly count."""
_WORKERS = 2
"""Threads of our loader, processes of PyTorch's."""


def examples_per_step(workload: str) -> int:
    """Return the number of examples in one step."""
    from jaxtrain.recipes import RECIPES

    return BATCHES * RECIPES[INPUTS[workload]].batch_size


def engine(job: Job) -> Engine:
    """Return the engine that reads `BATCHES` batches a step, by `jaxtrain.data` or `torch.utils.data.DataLoader`."""
    from jaxtrain.recipes import RECIPES

    recipe = RECIPES[INPUTS[job.workload]]
    source = recipe.task().train
    if job.engine == "jax":
        from jaxtrain.data.loader import Loader

        batches: Iterator[Any] = Loader(source, recipe.batch_size, seed=0, num_threads=_WORKERS)
    else:
        batches = _torch_batches(source, recipe.batch_size)

    def run_step() -> None:
        for _ in range(BATCHES):
            next(batches)

    return Engine(run_step, [], "cpu", lambda: None)


def _torch_batches(source: Any, batch_size: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    # Not forked: JAX, which initialized the recipe's model, has threads.
    options: dict[str, Any] = {"num_workers": _WORKERS, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(source, batch_size, shuffle=True, drop_last=True, **options)
    while True:
        yield from loader
