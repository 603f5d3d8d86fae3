"""Training over many devices: a mesh, what it divides, and a training step on it."""

from jaxtrain.distributed.memory import Memory, memory_per_device
from jaxtrain.distributed.mesh import make_mesh, run_mesh
from jaxtrain.distributed.program import constrained
from jaxtrain.distributed.rows import local_rows, placed, placed_whole
from jaxtrain.distributed.sharding import Rules, param_shardings, state_shardings
from jaxtrain.distributed.step import shard

__all__ = [
    "Memory",
    "Rules",
    "constrained",
    "local_rows",
    "make_mesh",
    "memory_per_device",
    "param_shardings",
    "placed",
    "placed_whole",
    "run_mesh",
    "shard",
    "state_shardings",
]
