"""The machine's ceilings, measured in the rounds of the work: the rates of a large matrix product and a large copy."""

import time
from collections.abc import Callable

from benchmarks.budget import fit_side
from benchmarks.engines import Engine
from benchmarks.job import Job

CEILINGS = ("product", "copy")
SIDE = {"cpu": 2048, "gpu": 8192, "cuda": 8192}
"""Side of the square matrices, by platform."""
COPY_BYTES = {"cpu": 1 << 26, "gpu": 1 << 30, "cuda": 1 << 30}
"""Bytes read, and as many written, by platform."""
CALL_LIMIT_S = 0.1
"""Longest product, which runs several times in a round.

PyTorch's bfloat16 on a CPU without bfloat16 units takes minutes for 2048x2048.
"""


def engine(job: Job) -> Engine:
    """Return the engine of a job whose workload is one of `CEILINGS`."""
    return jax_engine(job) if job.engine == "jax" else torch_engine(job)


def jax_engine(job: Job) -> Engine:
    """Return JAX's product, with operands in the precision's compute dtype, or JAX's copy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    device = jax.local_devices()[0]
    if job.workload == "copy":
        x = jnp.zeros(COPY_BYTES[device.platform] // 4, np.float32)
        add_one = jax.jit(lambda x: x + 1)
        return Engine(lambda: jax.block_until_ready(add_one(x)), [], device.device_kind, lambda: None)

    dtype = {"bf16": jnp.bfloat16, "fp16": np.float16}.get(job.precision, np.float32)
    precision = "highest" if job.precision == "fp32" else "default"
    matmul = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))

    def product(side: int) -> Callable[[], None]:
        a = jax.random.normal(jax.random.key(0), (side, side), dtype)
        return lambda: jax.block_until_ready(matmul(a, a))

    return _product_engine(job, product, SIDE[device.platform], device.device_kind)


def torch_engine(job: Job) -> Engine:
    """Return PyTorch's product or copy."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"

    def synchronized(fn: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            fn()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return call

    if job.workload == "copy":
        x = torch.zeros(COPY_BYTES[device.type] // 4, device=device)
        return Engine(synchronized(lambda: x + 1), [], device.type, lambda: None)

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision, torch.float32)

    def product(side: int) -> Callable[[], None]:
        a = torch.randn(side, side, device=device).to(dtype)
        return synchronized(lambda: a @ a)

    return _product_engine(job, product, SIDE[device.type], device.type)


def _product_engine(
    job: Job,
    product: Callable[[int], Callable[[], None]],
    largest: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """Return the engine of the largest product within `CALL_LIMIT_S`."""

    def call_seconds(side: int) -> float:
        call, seconds = product(side), []
        for _ in range(2):  # the first call may compile
            begin = clock()
            call()
            seconds.append(clock() - begin)
        return min(seconds)

    side = fit_side(call_seconds, largest, CALL_LIMIT_S)
    note = ""
    if side < largest:
        note = f"matrix product by {job.engine} in {job.precision}: reduced from {largest}x{largest} to {side}x{side}"
    return Engine(product(side), [], device, lambda: None, flops=2 * side**3, note=note)
