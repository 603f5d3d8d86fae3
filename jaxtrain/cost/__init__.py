"""FLOPs, memory, communication and roofline estimates of a compiled program."""

from jaxtrain.cost.byte_amounts import format_bytes, parse_bandwidth, parse_bytes
from jaxtrain.cost.communication import Communication, communication
from jaxtrain.cost.flops import equation_flops, flops
from jaxtrain.cost.memory import device_memory, peak_memory_bytes
from jaxtrain.cost.program_memory import StepMemory, memory_per_device
from jaxtrain.cost.roofline import NVIDIA, Ceilings, ceilings, estimate_seconds, find_gpu

__all__ = [
    "NVIDIA",
    "Ceilings",
    "Communication",
    "StepMemory",
    "ceilings",
    "communication",
    "device_memory",
    "equation_flops",
    "estimate_seconds",
    "find_gpu",
    "flops",
    "format_bytes",
    "memory_per_device",
    "parse_bandwidth",
    "parse_bytes",
    "peak_memory_bytes",
]
