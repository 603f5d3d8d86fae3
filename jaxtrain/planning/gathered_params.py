"""What a device keeps of the parameters that fsdp shards while it computes."""

import math
from typing import Any

import jax

from jaxtrain.cost import format_bytes
from jaxtrain.distributed import FSDP, parse_mesh, replicate_over
from jaxtrain.run import Recipe
from jaxtrain.step import TrainState, TrainStep


def gathered_bytes(step: TrainStep, state: TrainState, window: Any, accumulate: int) -> int:
    """Return the bytes of the parameters that a device keeps for a window with `reshard_after="window"`.

    Args:
      step: A step on a mesh.
      state: Shapes of its state, with their shardings.
      window: Shapes of its window of micro-batches.
      accumulate: Micro-batches of the window.
    """
    micro_batch = window if accumulate == 1 else jax.eval_shape(lambda x: jax.tree.map(lambda y: y[0], x), window)
    loss, used = step.parts.loss, []

    def kernels_in_8_bits(scales: Any, *args: Any) -> list[Any]:
        kernels = loss.kernels(scales, *args)
        used.append(loss.used_dtypes(scales, kernels, *args))
        return [{}] * len(jax.tree.leaves(args[0])) if kernels is None else [[*x.values()] for x in kernels.of_params]

    args = state.params, micro_batch, state.rng, state.model_state
    kernels = jax.eval_shape(kernels_in_8_bits, step.parts.scales(state).products, *args)

    def size(x: Any, dtype: Any) -> int:
        whole = replicate_over(x.sharding, (FSDP,))
        kept = dtype is not None and not whole.is_equivalent_to(x.sharding, len(x.shape))
        return dtype.itemsize * math.prod(whole.shard_shape(x.shape)) if kept else 0

    def size_in_8_bits(x: Any, parts: Any) -> int:
        (stored,) = {y.dtype for y in jax.tree.leaves(parts) if y.dtype.itemsize == 1} or {None}
        elements = sum(y.size for y in jax.tree.leaves(parts) if y.dtype.itemsize == 1)
        return size(x, stored) * elements // x.size

    sizes = jax.tree.map(size, state.params, used[0])
    return sum(jax.tree.leaves(sizes)) + sum(map(size_in_8_bits, jax.tree.leaves(state.params), kernels))


def gathered_params_json(recipe: Recipe, window_bytes: int) -> dict[str, Any]:
    """Return the recipe's setting and the bytes as JSON values."""
    return {"setting": recipe.reshard_after, "window_bytes": window_bytes}


def gathered_params_note(recipe: Recipe, window_bytes: int) -> str | None:
    """Return a note about the parameters that a device has gathered; None if fsdp does not divide them."""
    if recipe.mesh is None or parse_mesh(recipe.mesh)[FSDP] == 1:
        return None
    every = "" if recipe.accumulate == 1 else f" in each of {recipe.accumulate} micro-batches"
    forward = f"one layer at a time, gathered forwards and backwards{every}"
    window = f"{format_bytes(window_bytes)} of each device, gathered once per update"
    used, other, setting = (
        (forward, window, "window") if recipe.reshard_after == "forward" else (window, forward, "forward")
    )
    return f"gathered parameters: {used}; with --reshard-after {setting} {other}"
