"""Training on several devices: meshes, shardings, processes, and a training step on a mesh."""

from jaxtrain.cost import StepMemory, memory_per_device
from jaxtrain.distributed.compilation import bypass_compilation_cache
from jaxtrain.distributed.mesh import (
    AXES,
    DATA,
    FSDP,
    TENSOR,
    data_parallel_size,
    make_mesh,
    parse_mesh,
    run_mesh,
    run_mesh_sizes,
)
from jaxtrain.distributed.processes import is_first, process_group
from jaxtrain.distributed.program import constrain_shardings
from jaxtrain.distributed.rows import local_rows, place_batch, place_whole_batch, window_sharding
from jaxtrain.distributed.sharding import Rules, param_shardings, state_shardings
from jaxtrain.distributed.step import shard

__all__ = [
    "AXES",
    "DATA",
    "FSDP",
    "TENSOR",
    "Rules",
    "StepMemory",
    "bypass_compilation_cache",
    "constrain_shardings",
    "data_parallel_size",
    "is_first",
    "local_rows",
    "make_mesh",
    "memory_per_device",
    "param_shardings",
    "parse_mesh",
    "place_batch",
    "place_whole_batch",
    "process_group",
    "processes",
    "run_mesh",
    "run_mesh_sizes",
    "shard",
    "state_shardings",
    "window_sharding",
]
