"""What one device holds of a training step as it is divided over more of them (`fsdp`), counted by the compiler.

`python -m benchmarks.devices` prints it; the devices are a CPU's, made for the purpose, whatever the machine has.
"""

import json
import os
import subprocess
import sys
from typing import Any

DEVICES = (1, 2, 4, 8)
SIZES = {"vocab_size": 256, "width": 256, "depth": 4, "heads": 4, "rows": 8, "length": 64}


def memory() -> list[dict[str, int]]:
    """`devices`, and the bytes of one: `state` and batch, and the `temporaries` of a step. In a process of its own."""
    flags = f"--xla_force_host_platform_device_count={max(DEVICES)}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.devices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _counted(devices: int) -> dict[str, Any]:
    import jax

    import jaxtrain
    from benchmarks.workloads import WORKLOADS
    from jaxtrain.distributed import make_mesh, memory_per_device, shard
    from jaxtrain.models import gpt2
    from parity import jax_side, torch_side

    case = WORKLOADS["gpt2-tiny"].case(SIZES)
    mesh = make_mesh(f"fsdp={devices}", jax.devices()[:devices])
    step = shard(jaxtrain.train_step(case.loss_fn, case.optimizer.jax, clip_norm=case.clip_norm), mesh, gpt2.SHARDING)
    params, _ = jax_side.from_torch(case, torch_side.initial_weights(case, seed=0))
    held = memory_per_device(step, params, jax_side.arrays(case.batch(0, case.rows), "fp32"))
    return {"devices": devices, "state": held.arguments, "temporaries": held.temporaries}


if __name__ == "__main__":
    print(json.dumps([_counted(n) for n in DEVICES]))
