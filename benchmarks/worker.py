"""One engine in a process of its own: built and warmed up, then timed a turn at a time, whenever it is asked.

`python -m benchmarks.worker JOB`, which speaks JSON a line: what it built; for "turn N S" the seconds of each of N
steps or more, until S seconds are over; at the end of its input the most memory it held.
"""

import json
import sys
import tempfile
import time
from typing import Any

from benchmarks.job import Job
from jaxtrain.cpu.host_memory import keep_host_memory

WARM_UP = 3


def main(line: str) -> None:
    """Build the engine of a job, and obey standard input."""
    job = Job.from_json(line)
    # As `jaxtrain train` does. PyTorch's float32 gains 2 to 14% by it too; its bfloat16 would be 40% slower.
    if job.engine == "jax" or job.precision == "fp32":
        keep_host_memory()
    with tempfile.TemporaryDirectory() as cache:
        _keep_compilations_in(cache)
        _serve(job)


def _serve(job: Job) -> None:
    from benchmarks.memory import PeakMemory
    from parity import jax_side, torch_side  # noqa: F401, both frameworks, which are not to count

    memory = PeakMemory()
    built = _built(job)
    for _ in range(WARM_UP):
        built.step()
    _say(
        losses=built.losses[:WARM_UP],
        device=built.device,
        compile_s=built.compile_s,
        warm_compile_s=built.warm_compile_s,
        flops=built.flops,
    )
    for command in sys.stdin:
        _, steps, seconds = command.split()
        _say(**_turn(built, int(steps), float(seconds)))
    peak = built.peak_bytes()
    _say(peak_bytes=memory.of_process() if peak is None else peak)


def _built(job: Job) -> Any:
    from benchmarks import ceiling, engines, host, run, updates
    from benchmarks.workloads import WORKLOADS

    if job.workload in ceiling.CEILINGS:
        return ceiling.engine(job)
    if job.workload in updates.UPDATES:
        return updates.engine(job)
    if job.workload in host.INPUTS:
        return host.engine(job)
    if job.workload == run.WORKLOAD:
        return run.engine(job)
    return engines.engine(job, WORKLOADS[job.workload])


def _turn(built: Any, steps: int, seconds: float) -> dict[str, list[float]]:
    """At least so many steps, in at least so many seconds."""
    wall: list[float] = []
    cpu: list[float] = []
    while len(wall) < steps or sum(wall) < seconds:
        built.prepare()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        built.step()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return {"wall": wall, "cpu": cpu}


def _keep_compilations_in(cache: str) -> None:
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Engines share a GPU: what one reserves and does not use is not its peak, and not the others' either.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
