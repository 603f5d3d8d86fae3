"""GPUs to compile for on a machine that has none.

JAX's CUDA plugin compiles for a GPU that is described by figures, without a GPU, a driver or NVIDIA's libraries. What
it cannot do without a GPU is to run candidates: products are calls of cuBLASLt instead of the tiling that would be the
fastest on the device, and cuDNN's workspaces are counted as 0 bytes.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jaxtrain.compilation import without_compilation_cache
from jaxtrain.cost.data_sheets import NVIDIA, Ceilings
from jaxtrain.cost.gpu.links import Links
from jaxtrain.errors import UserError
from jaxtrain.fields import brief
from jaxtrain.program.internals import assumed_cudnn

COMPILER_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_cub_radix_sort": False,
}
"""Options that make programs comparable. Without a device XLA would take Triton's first tiling of each product, and
cannot ask CUB for the workspace of a large sort."""


@dataclass(frozen=True)
class GpuTarget:
    """A GPU to compile for.

    Attributes:
      name: JAX's `device_kind` of it.
      capability: Compute capability, as (major, minor).
      cores: Number of streaming multiprocessors.
      fp32_units: Units for float32 per multiprocessor.
      shared_memory: Bytes of shared memory per multiprocessor.
      l2_cache: Bytes of the L2 cache.
      clock_ghz: Boost clock.
      memory: Bytes of memory that programs may use.
      link_bandwidth: Bytes/s that a GPU sends to the others of its host, as NCCL assumes it (`src/graph/topo.h`): 20.6
        GB/s over each of 18 links of Hopper, 20 GB/s over each of 12 of Ampere.
      network_bandwidth: Bytes/s that a GPU sends to those of other hosts, over one network adapter of 400 Gbit/s.
      gpus_per_node: Number of GPUs of a host.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fp32_units: int
    shared_memory: int
    l2_cache: int
    clock_ghz: float
    memory: int
    link_bandwidth: float
    network_bandwidth: float = 50e9
    gpus_per_node: int = 8

    @property
    def ceilings(self) -> Ceilings:
        """Its peak rates."""
        return NVIDIA[self.name]

    @property
    def links(self) -> Links:
        """Its links in a node and between nodes."""
        return Links(self.link_bandwidth, self.network_bandwidth, self.gpus_per_node)

    def config(self) -> str:
        """Return the `stream_executor.GpuTargetConfigProto` as text."""
        major, minor = self.capability
        features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              core_count: {self.cores} fpus_per_core: {self.fp32_units}
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory - 1024}
              shared_memory_per_core: {self.shared_memory} l2_cache_size: {self.l2_cache}
              memory_bandwidth: {int(self.ceilings.bandwidth)} device_memory_size: {self.memory}
              clock_rate_ghz: {self.clock_ghz}
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              device_vendor: "NVIDIA Corporation" name: "{self.name}" device_address_bits: 64
              pcie_bandwidth: 34359738368 ecc_enabled: true device_interconnect_info {{ active_links: 18 }}
              driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
              dnn_version: "9.10.0" cub_version: "3.1.2"
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """


_H100 = GpuTarget(
    "NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fp32_units=128,
    shared_memory=233472,
    l2_cache=52428800,
    clock_ghz=1.98,
    memory=84942979072,
    link_bandwidth=18 * 20.6e9,
)
# Figures as XLA publishes them (xla/backends/gpu/target_config/specs); peak rates and network adapters from
# NVIDIA's data sheets.
TARGETS = {
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,
        name="NVIDIA H200",
        memory=151397597184,
    ),
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fp32_units=64,
        shared_memory=167936,
        l2_cache=41943040,
        clock_ghz=1.41,
        memory=85100068864,
        link_bandwidth=12 * 20e9,
        network_bandwidth=25e9,
    ),
}
"""GPUs by the name that `jaxtrain plan --device` takes."""


def find_target(name: str) -> GpuTarget:
    """Return the target of a name.

    Raises:
      UserError: There is none.

    Example:
      >>> find_target("H100").name
      'NVIDIA H100 80GB HBM3'
    """
    if name.casefold() not in TARGETS:
        raise UserError(f"device {brief(name)} is not known: choose one of {', '.join(TARGETS)}")
    return TARGETS[name.casefold()]


def target_of(device: jax.Device) -> GpuTarget | None:
    """Return the target that a device is; None for other devices.

    Example:
      >>> print(target_of(jax.devices("cpu")[0]))
      None
    """
    return next((target for target in TARGETS.values() if target.name == device.device_kind), None)


@functools.cache
def gpu_devices(target: GpuTarget, count: int) -> Sequence[jax.Device]:
    """Return `count` devices to compile for, as many on each host as it has; nothing can run on them.

    Args:
      target: The GPU.
      count: How many.

    Raises:
      UserError: JAX's CUDA plugin is not installed, or does not fit this JAX.
    """
    hosts = math.ceil(count / target.gpus_per_node)
    shape = f"1x{hosts}x{count // hosts}"
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=target.config(), topology=shape)
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"JAX cannot compile for {target.name} here ({brief(str(error))}): install the CUDA plugin with "
            "pip install 'jaxtrain[gpu-programs]', and set JAX_PLATFORMS=cpu on a machine without a GPU"
        ) from error
    return tuple(topology.devices)


@contextlib.contextmanager
def compilation_for_gpus() -> Iterator[None]:
    """Let JAX lower cuDNN's attention on a machine without cuDNN, and keep programs that it cannot load uncached."""
    with assumed_cudnn((9, 10, 0)), without_compilation_cache():
        yield
