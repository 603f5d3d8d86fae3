"""The processes of one run: how they find each other, what one does for all, and how they end together.

Each runs the same program on its own devices, and a computation over all devices is one that all of them call. The
first one speaks and writes; what only it may do, `once` lets it do for all.
"""

import atexit
import contextlib
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

import jax

from jaxtrain.errors import RunFailed, UserError
from jaxtrain.transforms import jax_internals

T = TypeVar("T")

HEARTBEAT_SECONDS = 20
"""A process that gives no sign of life for so long is dead: the runtime then ends the others."""
_SHUTDOWN_SECONDS = 3600  # that the others wait at the end for the first one, which has things left to write
_WORD_SECONDS = 5  # that a process which fails waits for what the others have to say
_ALWAYS = 2**31 - 1  # milliseconds: if the other dies before, so do we
# What XLA's collectives raise when the other end of a connection is gone.
_BROKEN = re.compile("Gloo|NCCL")
_turns = itertools.count()
_runtime: Any = getattr(jax_internals.distributed, "global_state", None)


def count() -> int:
    """How many processes the run has."""
    return _runtime.num_processes if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the one that speaks and writes."""
    return not jax.distributed.is_initialized() or _runtime.process_id == 0


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Joins the other processes, where there are any; an error that all of them raise, the first alone then raises.

    The others exit, with its status. Where a process fails alone, the others end with a `RunFailed` that names it: at
    once where it could say that it fails, else when the runtime misses its heartbeat.
    """
    start()
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if count() > 1:
            _leave(error)
        raise


def start() -> None:
    """Join the other processes, where `initialize_arguments` finds any: before that no device may be asked for.

    Where another program has called `jax.distributed.initialize` before, that holds. Only the first one keeps its
    standard output. Raises `UserError` where they do not find each other.
    """
    if not jax.distributed.is_initialized() and (found := initialize_arguments(os.environ)) is not None:
        _initialize(found)
    if not is_first():
        sys.stdout.flush()
        # Not Python's alone: the collectives report their connections there too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _initialize(found: dict[str, Any]) -> None:
    try:
        jax.distributed.initialize(
            **found, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=_SHUTDOWN_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(
            f"the processes did not find each other ({why}): mend their launcher's settings, or set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each"
        ) from error


def initialize_arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Of `jax.distributed.initialize`, for this process; None for one that is alone, which needs none.

    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and `JAX_COORDINATOR_ADDRESS` come before what Open MPI, Slurm and Kubernetes
    set. Raises `UserError` for settings that name no process.

    >>> initialize_arguments({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "…"})
    {'cluster_detection_method': 'ompi'}
    >>> initialize_arguments({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # in a job, but not started by srun
    """
    if _number(environment, "JAX_NUM_PROCESSES") > 1:
        return _numbered(environment, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    # Before Slurm: mpirun starts its daemons by srun.
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        if "OMPI_MCA_orte_hnp_uri" in environment:
            return {"cluster_detection_method": "ompi"}
        return _open_mpi_5(environment)
    # Of the step, which a shell in an allocation is not, whatever SLURM_NTASKS says.
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return {"cluster_detection_method": "slurm"}
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    # JAX asks the cluster's API how many there are, by this package.
    return {} if indexed and find_spec("kubernetes") else None


def _open_mpi_5(environment: Mapping[str, str]) -> dict[str, Any]:
    """Of Open MPI from 5.0 on, which does not say where its launcher is."""
    found = _numbered(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if found["coordinator_address"] is None:
        if environment["OMPI_COMM_WORLD_SIZE"] != environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
            raise UserError(
                "Open MPI 5 does not say where its first process is: "
                "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT, with the first host's name and a free port"
            )
        # All on one machine: a port that is the job's own, in the range that JAX takes it from under Open MPI 4.
        port = 2**16 - 2**12 + zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode()) % 2**12
        found["coordinator_address"] = f"127.0.0.1:{port}"
    return {**found, "local_device_ids": [_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")]}


def _numbered(environment: Mapping[str, str], size: str, rank: str) -> dict[str, Any]:
    n, i = _number(environment, size), _number(environment, rank, missing=-1)
    if not 0 <= i < n:
        raise UserError(f"{rank} is {environment.get(rank, 'not set')}, of {n} processes: make it 0 to {n - 1}")
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if size.startswith("JAX") and not address:
        raise UserError(f"JAX_COORDINATOR_ADDRESS is not set, of {n} processes: make it HOST:PORT of the first one")
    return {
        "coordinator_address": address,
        "num_processes": n,
        "process_id": i,
        "cluster_detection_method": "deactivate",
    }


def _number(environment: Mapping[str, str], name: str, missing: int = 0) -> int:
    value = environment.get(name, missing)
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}, which is no number: mend it") from None


def once(do: Callable[[], T]) -> T:
    """`do()`, by the first process alone: what it returned, as JSON, or the `UserError` it raised, in all of them.

    >>> once(lambda: 1 + 1)
    2
    """
    if count() == 1:
        return do()
    key = f"jaxtrain/once/{next(_turns)}"
    if is_first():
        try:
            done = do()
        except UserError as error:
            _runtime.client.key_value_set(key, json.dumps({"error": str(error), "status": error.exit_status}))
            raise
        _runtime.client.key_value_set(key, json.dumps({"done": done}))
        return done
    told = json.loads(_runtime.client.blocking_key_value_get(key, _ALWAYS))
    if "error" in told:
        raise (RunFailed if told["status"] == RunFailed.exit_status else UserError)(told["error"])
    return told["done"]


def _leave(error: BaseException) -> None:
    """Return where `error` is to be raised by this process, raise what is to be raised instead.

    What it says is told to the others. Nothing that waits for another process is done after that.
    """
    said = error
    if not _BROKEN.search(str(error)):
        _tell("failed", error)
    elif (gone := _gone()) == "interrupted":
        said = KeyboardInterrupt()
    else:
        said = RunFailed(f"{gone}: what is saved is whole: --resume auto")
    _tell("said", said)
    first, place = is_first(), f"process {_runtime.process_id} of {count()}"
    of_first = _said(said) if first else _said_by_first()
    # Where one is gone, the first only waits for the others to read.
    if of_first is not None and _all_meet(_WORD_SECONDS if said is error else 1):
        jax.distributed.shutdown()  # or the runtime would abort those that the first one leaves behind
    if not first and of_first == _said(said):
        _exit(_exit_status(said))
    if not first and isinstance(said, UserError):
        said = type(said)(f"{place}: {said}")
    # At the interpreter's end JAX would wait for processes that do not end; this comes before.
    atexit.register(_exit, _exit_status(said))
    if said is not error:
        raise said from error


def _exit_status(error: BaseException) -> int:
    """As the command line has it."""
    return getattr(error, "exit_status", 130 if isinstance(error, KeyboardInterrupt) else 1)


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _tell(what: str, error: BaseException) -> None:
    """For the others to read, under `what`."""
    with contextlib.suppress(RuntimeError, ValueError):  # the first one may be gone, and the store with it
        _runtime.client.key_value_set(f"jaxtrain/{what}/{_runtime.process_id}", _said(error))


def _said_by_first() -> str | None:
    """What the first process says, if it ends too."""
    with contextlib.suppress(RuntimeError, ValueError):
        return str(_runtime.client.blocking_key_value_get("jaxtrain/said/0", 1000 * _WORD_SECONDS))
    return None


def _all_meet(seconds: int) -> bool:
    """Whether all processes come to their end now."""
    with contextlib.suppress(RuntimeError, ValueError):
        _runtime.client.wait_at_barrier("jaxtrain/said", 1000 * seconds)
        return True
    return False


def _gone() -> str:
    """Which process is gone, in words: what it told before; else those that do not come where the others meet."""
    n = count()
    with contextlib.suppress(RuntimeError, ValueError):
        for key, text in _runtime.client.key_value_dir_get("jaxtrain/failed/"):
            interrupted = text.startswith(KeyboardInterrupt.__name__)
            return "interrupted" if interrupted else f"process {key.rpartition('/')[2]} of {n} has failed ({text})"
    try:
        _runtime.client.wait_at_barrier("jaxtrain/still-here", 1000 * 2 * _WORD_SECONDS)
    except (RuntimeError, ValueError) as error:
        if missed := re.search(r"timed out task names:\s+((?:\d+\s+)+)", str(error)):
            silent = ", ".join(missed[1].split())
            return f"process {silent} of {n} does not answer any more"
    return f"the connection to another of {n} processes is broken"
