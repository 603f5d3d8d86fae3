"""What a training step takes of every device's memory, known from its compiled program before anything is allocated."""

from typing import Any, NamedTuple

from jaxtrain.step import TrainStep


class Memory(NamedTuple):
    """Bytes of one device: of state and batch, and of what the step has besides while it runs."""

    arguments: int
    temporaries: int


def memory_per_device(step: TrainStep, params: Any, batch: Any, *, model_state: Any = None) -> Memory:
    """Of `step` from a state around `params`, which may be shapes or a function that makes them, with `batch`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxtrain import Loss, train_step
    >>> from jaxtrain.distributed import make_mesh, shard
    >>> def loss_fn(params, batch, rng):
    ...     return Loss(((batch @ params) ** 2).sum(), weight=len(batch)), {}
    >>> step = shard(train_step(loss_fn, optax.adam(0.1)), make_mesh("fsdp=1", jax.devices()[:1]))
    >>> memory_per_device(step, lambda: jnp.zeros(4096), jnp.ones((2, 4096))).arguments // 2**14
    5
    """
    analysis = step.compile(step.shapes(params, model_state=model_state), batch).memory_analysis()
    return Memory(int(analysis.argument_size_in_bytes), int(analysis.temp_size_in_bytes))
