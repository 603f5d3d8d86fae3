"""Training over many devices: a mesh, what it divides, and a training step on it."""

from jaxtrain.cost import Memory, memory_per_device
from jaxtrain.distributed.compilation import bypass_compilation_cache
from jaxtrain.distributed.mesh import AXES, DATA, FSDP, TENSOR, make_mesh, resolved, run_mesh, sizes, ways
from jaxtrain.distributed.processes import is_first, together
from jaxtrain.distributed.program import constrained
from jaxtrain.distributed.rows import local_rows, placed, placed_whole, window_sharding
from jaxtrain.distributed.sharding import Rules, param_shardings, state_shardings
from jaxtrain.distributed.step import shard

__all__ = [
    "AXES",
    "DATA",
    "FSDP",
    "TENSOR",
    "Memory",
    "Rules",
    "bypass_compilation_cache",
    "constrained",
    "is_first",
    "local_rows",
    "make_mesh",
    "memory_per_device",
    "param_shardings",
    "placed",
    "placed_whole",
    "processes",
    "resolved",
    "run_mesh",
    "shard",
    "sizes",
    "state_shardings",
    "together",
    "ways",
    "window_sharding",
]
