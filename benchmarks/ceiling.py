"""What the machine can do at most, measured in the same run: a large matrix product, and a large copy."""

from collections.abc import Callable

from benchmarks.engines import Engine
from benchmarks.job import Job

SIDE = {"cpu": 2048, "gpu": 8192, "cuda": 8192}
"""Of the square matrices, by platform."""
COPIED = {"cpu": 1 << 26, "gpu": 1 << 30, "cuda": 1 << 30}
"""Bytes read, and as many written."""


def jax_engine(job: Job) -> Engine:
    """`job.workload` "product", of operands in the precision's compute dtype, or "copy", by JAX."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    device = jax.local_devices()[0]
    if job.workload == "copy":
        x = jnp.zeros(COPIED[device.platform] // 4, np.float32)
        fn, args, flops = jax.jit(lambda x: x + 1), [x], None
    else:
        n = SIDE[device.platform]
        dtype = {"bf16": jnp.bfloat16, "fp16": np.float16}.get(job.precision, np.float32)
        a = jax.random.normal(jax.random.key(0), (n, n), dtype)
        precision = "highest" if job.precision == "fp32" else "default"
        fn, args, flops = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision)), [a, a], 2 * n**3

    def take() -> None:
        jax.block_until_ready(fn(*args))

    return Engine(take, [], device.device_kind, lambda: None, flops=flops)


def torch_engine(job: Job) -> Engine:
    """The same by PyTorch."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    if job.workload == "copy":
        x = torch.zeros(COPIED[device.type] // 4, device=device)
        fn: Callable[[], object] = lambda: x + 1  # noqa: E731
        flops = None
    else:
        n = SIDE[device.type]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision, torch.float32)
        a = torch.randn(n, n, device=device).to(dtype)
        fn, flops = lambda: a @ a, 2 * n**3

    def take() -> None:
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return Engine(take, [], device.type, lambda: None, flops=flops)


CEILINGS = ("product", "copy")


def engine(job: Job) -> Engine:
    """The engine of `job`, whose workload is one of `CEILINGS`."""
    return jax_engine(job) if job.engine == "jax" else torch_engine(job)
