"""Training on several devices: meshes, shardings, processes, and a training step on a mesh."""

from jaxtrain.cost import StepMemory, memory_per_device
from jaxtrain.distributed.constrained_loss import constrain_shardings
from jaxtrain.distributed.fresh_programs import bypass_compilation_cache as bypass_compilation_cache
from jaxtrain.distributed.mesh import AXES as AXES
from jaxtrain.distributed.mesh import DATA as DATA
from jaxtrain.distributed.mesh import DCN as DCN
from jaxtrain.distributed.mesh import EXPERT as EXPERT
from jaxtrain.distributed.mesh import FSDP as FSDP
from jaxtrain.distributed.mesh import PIPELINE as PIPELINE
from jaxtrain.distributed.mesh import ROWS as ROWS
from jaxtrain.distributed.mesh import SEQUENCE as SEQUENCE
from jaxtrain.distributed.mesh import TENSOR as TENSOR
from jaxtrain.distributed.mesh import data_parallel_size, make_mesh, run_mesh, run_mesh_sizes
from jaxtrain.distributed.mesh import describe_devices as describe_devices
from jaxtrain.distributed.mesh import parse_mesh as parse_mesh
from jaxtrain.distributed.mesh import run_devices as run_devices
from jaxtrain.distributed.mesh import sequence_parallel_size as sequence_parallel_size
from jaxtrain.distributed.processes import is_first as is_first
from jaxtrain.distributed.processes import process_group as process_group
from jaxtrain.distributed.rows import local_rows, place_batch, place_whole_batch
from jaxtrain.distributed.rows import window_sharding as window_sharding
from jaxtrain.distributed.sharded_step import shard
from jaxtrain.distributed.sharding import Rules, param_shardings, state_shardings
from jaxtrain.distributed.sharding import replicate_over as replicate_over

__all__ = [
    "Rules",
    "StepMemory",
    "constrain_shardings",
    "data_parallel_size",
    "local_rows",
    "make_mesh",
    "memory_per_device",
    "param_shardings",
    "place_batch",
    "place_whole_batch",
    "processes",
    "run_mesh",
    "run_mesh_sizes",
    "shard",
    "state_shardings",
]
