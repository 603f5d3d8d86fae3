"""The process of one engine: builds it, warms it up, then times turns of steps on request.

`python -m benchmarks.worker JOB` answers each command on standard input by one JSON line:

    first          build the engine and run its first step: its seconds, and the engine's note
    warm           run the other warm-up steps: seconds of the last, device, compile times, FLOPs
    turn N S       run at least N steps, for at least S seconds: seconds of each
    (end of input) peak memory in bytes
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
    """Serve a job's engine until the end of standard input."""
    job = Job.from_json(line)
    # As `jaxtrain train` does. PyTorch's float32 gains 2 to 14% by it too; its bfloat16 would be 40% slower.
    if job.engine == "jax" or job.precision == "fp32":
        keep_host_memory()
    with tempfile.TemporaryDirectory() as cache:
        _set_cache(cache)
        _serve(job)


def _serve(job: Job) -> None:
    from benchmarks.memory import PeakMemory
    from parity.sides import torch_side  # noqa: F401, both frameworks, so that neither counts as memory

    memory = PeakMemory()
    engine = build_engine(job)
    for command in sys.stdin:
        match command.split():
            case ["first"]:
                _send(first_s=time_steps(engine, 1, 0.0)["wall"][0], note=engine.note)
            case ["warm"]:
                step_s = time_steps(engine, WARM_UP - 1, 0.0)["wall"][-1]
                _send(
                    step_s=step_s,
                    device=engine.device,
                    compile_s=engine.compile_s,
                    warm_compile_s=engine.warm_compile_s,
                    flops=engine.flops,
                    predicted=engine.predicted,
                    units=engine.units,
                )
            case ["turn", steps, seconds]:
                _send(**time_steps(engine, int(steps), float(seconds)))
    peak = engine.peak_bytes()
    _send(peak_bytes=memory.bytes_above_start() if peak is None else peak)


def build_engine(job: Job) -> Any:
    """Return the `benchmarks.engines.Engine` of any job."""
    from benchmarks import ceiling, engines, host, ported_engines, run, updates
    from benchmarks.own_work import workload_of

    if job.workload in ceiling.CEILINGS:
        return ceiling.engine(job)
    if job.workload in updates.UPDATES:
        return updates.engine(job)
    if job.workload in host.INPUTS:
        return host.engine(job)
    if job.workload == run.WORKLOAD:
        return run.engine(job)
    if job.workload.startswith(ported_engines.PREFIX):
        return ported_engines.engine(job)
    return engines.engine(job, workload_of(job.workload))


def time_steps(engine: Any, steps: int, seconds: float) -> dict[str, list[float]]:
    """Time at least `steps` steps, for at least `seconds` seconds.

    Returns:
      Seconds of each step: "wall" by the clock, "cpu" of all threads of the process.
    """
    wall: list[float] = []
    cpu: list[float] = []
    while len(wall) < steps or sum(wall) < seconds:
        engine.prepare()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        engine.step()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return {"wall": wall, "cpu": cpu}


def _set_cache(cache: str) -> None:
    """Point the compilers' persistent caches to an empty folder."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Engines share a GPU: memory reserved but unused by one is not its peak, and is missing to the others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _send(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
