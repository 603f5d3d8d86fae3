"""Memory per device of an `fsdp` training step over growing numbers of devices, as the compiler counts it.

`python -m benchmarks.devices` prints it for virtual CPU devices, whatever the machine has.
"""

import json
import os
import subprocess
import sys
from typing import Any

DEVICES = (1, 2, 4, 8)
SIZES = {"vocab_size": 256, "width": 256, "depth": 4, "heads": 4, "rows": 8, "length": 64}


def memory_by_devices(timeout: float) -> list[dict[str, int]]:
    """Count the memory per device in a subprocess.

    Args:
      timeout: Time limit in seconds.

    Returns:
      A row for each number of `devices`: bytes per device of `state` and batch, and of the `temporaries` of a step;
      empty if they are not counted within the time limit.
    """
    flags = f"--xla_force_host_platform_device_count={max(DEVICES)}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.devices"]
    try:
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return []
    rows: list[dict[str, int]] = json.loads(completed.stdout.splitlines()[-1])
    return rows


def _memory_on(devices: int) -> dict[str, Any]:
    import jax

    import jaxtrain
    from benchmarks.workloads import WORKLOADS
    from jaxtrain.distributed import make_mesh, memory_per_device, shard
    from jaxtrain.models import gpt2
    from parity.sides import jax_side, torch_side

    case = WORKLOADS["gpt2-tiny"].case(SIZES)
    mesh = make_mesh(f"fsdp={devices}", jax.devices()[:devices])
    step = shard(jaxtrain.train_step(case.loss_fn, case.optimizer.jax, clip_norm=case.clip_norm), mesh, gpt2.SHARDING)
    params, _ = jax_side.from_torch(case, torch_side.initial_weights(case, seed=0))
    memory = memory_per_device(step, params, jax_side.arrays(case.batch(0, case.rows), "fp32"))
    return {"devices": devices, "state": memory.arguments, "temporaries": memory.temporaries}


if __name__ == "__main__":
    print(json.dumps([_memory_on(n) for n in DEVICES]))
