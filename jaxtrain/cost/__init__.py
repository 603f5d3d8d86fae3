"""FLOPs, memory, communication and roofline estimates of a compiled program."""

from jaxtrain.cost.byte_amounts import format_bytes as format_bytes
from jaxtrain.cost.byte_amounts import parse_bandwidth as parse_bandwidth
from jaxtrain.cost.byte_amounts import parse_bytes as parse_bytes
from jaxtrain.cost.communication import Communication as Communication
from jaxtrain.cost.communication import Traffic as Traffic
from jaxtrain.cost.communication import communication as communication
from jaxtrain.cost.data_sheets import NVIDIA as NVIDIA
from jaxtrain.cost.data_sheets import Ceilings as Ceilings
from jaxtrain.cost.data_sheets import ceilings as ceilings
from jaxtrain.cost.data_sheets import find_gpu as find_gpu
from jaxtrain.cost.data_sheets import known_ceilings as known_ceilings
from jaxtrain.cost.data_sheets import utilization_note as utilization_note
from jaxtrain.cost.executed import executed as executed
from jaxtrain.cost.flops import count_flops as count_flops
from jaxtrain.cost.flops import flops as flops
from jaxtrain.cost.gpu import SHARE_OF_PEAK as SHARE_OF_PEAK
from jaxtrain.cost.gpu import Buffer as Buffer
from jaxtrain.cost.gpu import GpuProgram as GpuProgram
from jaxtrain.cost.gpu import GpuTarget as GpuTarget
from jaxtrain.cost.gpu import compile_for_gpu as compile_for_gpu
from jaxtrain.cost.gpu import find_target as find_target
from jaxtrain.cost.gpu import gpu_devices as gpu_devices
from jaxtrain.cost.gpu import group_along as group_along
from jaxtrain.cost.gpu import target_of as target_of
from jaxtrain.cost.memory import device_memory as device_memory
from jaxtrain.cost.memory import peak_memory_bytes
from jaxtrain.cost.program_memory import StepMemory, memory_per_device
from jaxtrain.cost.roofline import equation_seconds as equation_seconds
from jaxtrain.cost.roofline import estimate_seconds as estimate_seconds

__all__ = ["StepMemory", "memory_per_device", "peak_memory_bytes"]
