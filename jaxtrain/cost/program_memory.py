"""Memory of a training step on each device, read from its compiled program before anything is allocated."""

from typing import Any, NamedTuple

from jaxtrain.step import TrainStep


class StepMemory(NamedTuple):
    """Bytes that a training step needs on one device.

    Attributes:
      arguments: State and batch.
      temporaries: Everything else that is allocated while the step runs.
    """

    arguments: int
    temporaries: int


def memory_per_device(step: TrainStep, params: Any, batch: Any, *, model_state: Any = None) -> StepMemory:
    """Return the memory that a training step needs on each device, without running it.

    Args:
      step: The step; on a mesh, the result of `jaxtrain.distributed.shard`.
      params: The parameters, their shapes, or a function that creates them.
      batch: A batch [B, …].
      model_state: The model state, its shapes, or a function that creates it.

    Returns:
      The bytes of arguments and temporaries.

    Example:
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
    return StepMemory(int(analysis.argument_size_in_bytes), int(analysis.temp_size_in_bytes))
