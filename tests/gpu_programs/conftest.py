"""GPUs to compile for that need not be there: JAX's plugin for CUDA compiles from a description of the device."""

import pytest
from jax.experimental import topologies

DEVICE = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 65536 shared_memory_per_core: 102400
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1000000000000 l2_cache_size: 33554432 clock_rate_ghz: 1.5 device_memory_size: 17179869184
  cuda_compute_capability {{ major: {major} minor: {minor} }} device_vendor: "NVIDIA Corporation" name: "GPU"
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "GPU"
"""
PRODUCTS_BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0"}
"""Compiler options; without a device to time them on, Triton's tilings are arbitrary."""


@pytest.fixture(scope="session")
def gpus():
    """Return a function that returns `count` GPUs of a compute capability."""
    pytest.importorskip("jax_plugins.xla_cuda12")

    def describe(major, minor=0, count=1):
        config = DEVICE.format(major=major, minor=minor)
        return topologies.get_topology_desc("", "cuda", target_config=config, topology=f"1x1x{count}").devices

    return describe
