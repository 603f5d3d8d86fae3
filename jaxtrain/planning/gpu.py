"""The program of a training step for GPUs that this machine does not have."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from jaxtrain.cost import GpuProgram, GpuTarget, compile_for_gpu, find_target, gpu_devices
from jaxtrain.distributed import Rules, make_mesh, parse_mesh, shard, window_sharding
from jaxtrain.step import TrainStep, split_batch


def gpu_program(
    step: TrainStep,
    params: Any,
    batch: Any,
    device: str | GpuTarget = "h100",
    *,
    mesh: str | None = None,
    rules: Rules | None = None,
    model_state: Any = None,
) -> GpuProgram:
    """Compile a training step for a GPU, or a mesh of them, on a machine without any.

    The extra `gpu-programs` installs the compiler; set JAX_PLATFORMS=cpu on a machine without NVIDIA's libraries.

    Args:
      step: The step for one device.
      params: The parameters, their shapes, or a function that creates them.
      batch: A batch [k·B, …], or its shapes.
      device: The GPU: h100, h200 or a100.
      mesh: Sizes of the mesh, such as "data=2,fsdp=4"; None for one GPU.
      rules: `PartitionSpec`s of the parameters by path, as `jaxtrain.distributed.shard` takes them.
      model_state: The model state, its shapes, or a function that creates it.

    Returns:
      The program, with its memory, launches, bytes moved and predicted time.

    Raises:
      UserError: The GPU is unknown, or the compiler is not installed.
    """
    target = find_target(device) if isinstance(device, str) else device
    sizes = {} if mesh is None else parse_mesh(mesh)
    devices = gpu_devices(target, math.prod(sizes.values()))
    grid = None if mesh is None else make_mesh(mesh, devices)
    on_gpus = step.for_platform("gpu") if grid is None else shard(step, grid, rules)

    def lower() -> Any:
        state = on_gpus.shapes(params, model_state=model_state)
        if grid is not None:
            return on_gpus.jitted.lower(state, window_shapes(batch, grid, step.parts.options.accumulate))
        placed = SingleDeviceSharding(devices[0])
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), (state, batch))
        return on_gpus.jitted.lower(*arguments)

    program = compile_for_gpu(lower, target, sizes)
    return dataclasses.replace(program, compiler_options=on_gpus.compiler_options or {})


def window_shapes(batch: Any, mesh: Mesh, accumulate: Any) -> Any:
    """Return the shapes and shardings of a batch placed by `jaxtrain.distributed.place_batch`."""
    sharding, shapes = window_sharding(mesh, accumulate), jax.eval_shape(lambda x: split_batch(x, accumulate), batch)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
