"""Programs compiled for GPUs that this machine does not have, and what is in them."""

from jaxtrain.cost.gpu.buffers import Buffer as Buffer
from jaxtrain.cost.gpu.compiled_program import SHARE_OF_PEAK as SHARE_OF_PEAK
from jaxtrain.cost.gpu.compiled_program import GpuProgram as GpuProgram
from jaxtrain.cost.gpu.compiled_program import compile_for_gpu as compile_for_gpu
from jaxtrain.cost.gpu.launches import Launch as Launch
from jaxtrain.cost.gpu.links import Links as Links
from jaxtrain.cost.gpu.links import group_along as group_along
from jaxtrain.cost.gpu.overlap import Transfer as Transfer
from jaxtrain.cost.gpu.product_calls import Product as Product
from jaxtrain.cost.gpu.target import TARGETS as TARGETS
from jaxtrain.cost.gpu.target import GpuTarget as GpuTarget
from jaxtrain.cost.gpu.target import find_target as find_target
from jaxtrain.cost.gpu.target import gpu_devices as gpu_devices
from jaxtrain.cost.gpu.target import target_of as target_of
