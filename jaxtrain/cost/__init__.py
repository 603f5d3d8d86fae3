"""FLOPs, memory, communication and roofline estimates of a compiled program."""

from jaxtrain.cost.communication import Communication, communication
from jaxtrain.cost.flops import equation_flops, flops
from jaxtrain.cost.memory import device_memory, parsed_bandwidth, parsed_bytes, peak_memory_bytes, shown_bytes
from jaxtrain.cost.program_memory import Memory, memory_per_device
from jaxtrain.cost.roofline import NVIDIA, Ceilings, ceilings, named, seconds

__all__ = [
    "NVIDIA",
    "Ceilings",
    "Communication",
    "Memory",
    "ceilings",
    "communication",
    "device_memory",
    "equation_flops",
    "flops",
    "memory_per_device",
    "named",
    "parsed_bandwidth",
    "parsed_bytes",
    "peak_memory_bytes",
    "seconds",
    "shown_bytes",
]
