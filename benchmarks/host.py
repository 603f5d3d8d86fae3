"""What the host does: reading examples into batches, and a step that leaves a device nothing to do."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.engines import Engine
from benchmarks.job import Job

INPUTS: Mapping[str, str] = {"input-text": "gpt-stdlib", "input-images": "digits-cnn"}
"""Workload -> the recipe whose training examples are read, shuffled, in its own batches."""
ENGINES = ("jax", "torch_eager")
BATCHES = 100
"""To a step: what was read ahead while others had their turn is little beside them."""
_WORKERS = 2
"""Threads of our loader; processes of PyTorch's."""


def examples(workload: str) -> int:
    """Examples to a step."""
    from jaxtrain.recipes import RECIPES

    return BATCHES * RECIPES[INPUTS[workload]].batch_size


def engine(job: Job) -> Engine:
    """The loader of `job.engine`: `jaxtrain.data`'s, or `torch.utils.data.DataLoader`. A step takes `BATCHES`."""
    from jaxtrain.recipes import RECIPES
    from jaxtrain.tasks import build

    recipe = RECIPES[INPUTS[job.workload]]
    source = build(recipe).train
    if job.engine == "jax":
        from jaxtrain.data.loader import Loader

        batches: Iterator[Any] = Loader(source, recipe.batch_size, seed=0, num_threads=_WORKERS)
    else:
        batches = _endless(source, recipe.batch_size)

    def take() -> None:
        for _ in range(BATCHES):
            next(batches)

    return Engine(take, [], "cpu", lambda: None)


def _endless(source: Any, batch_size: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    # Not forked: JAX, which initialised the recipe's model, has threads.
    options: dict[str, Any] = {"num_workers": _WORKERS, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(source, batch_size, shuffle=True, drop_last=True, **options)
    while True:
        yield from loader
