"""The processes of a run: how they connect, run code in the first process only, and exit together.

Every process runs the same program on its own devices, and all of them call each computation over all devices. The
first process prints and writes files; `once` runs a function in it and returns the result in all of them.
"""

import atexit
import contextlib
import ipaddress
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

import jax

from jaxtrain.errors import RunFailed, UserError
from jaxtrain.program import internals

T = TypeVar("T")

HEARTBEAT_SECONDS = 20
"""A process without a heartbeat for this long is dead, and the runtime ends the others."""
_SHUTDOWN_SECONDS = 3600  # how long the others wait at the end for the first process, which may still write files
_MESSAGE_SECONDS = 5  # how long a failing process waits for messages of the others
_SAVE_SECONDS = 15  # how long a process may save after its launcher has ended
LAUNCHER_PIPE = "JAXTRAIN_LAUNCHER_PIPE"
"""Environment variable with the number of a pipe that closes when the launcher ends."""
_FOREVER_MS = 2**31 - 1  # milliseconds; if the other process dies, the runtime ends this one
# Errors of XLA's collectives when the other end of a connection is gone.
_BROKEN = re.compile("Gloo|NCCL")
_turns = itertools.count()
_runtime: Any = getattr(internals.distributed, "global_state", None)


def count() -> int:
    """Return the number of processes of the run."""
    return _runtime.num_processes if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Return whether this is the first process, which prints and writes files."""
    return not jax.distributed.is_initialized() or _runtime.process_id == 0


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Connect to the other processes, if there are any, and exit together with them.

    An error that all processes raise is raised by the first one; the others exit with its status. If a single process
    fails, the others raise a `RunFailed` that names it: at once if it could report its failure, otherwise when its
    heartbeat is missing.
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
    """Connect to the other processes that `initialize_arguments` finds; call it before the first use of a device.

    An earlier call of `jax.distributed.initialize` is respected. Standard output of all processes but the first is
    discarded.

    Raises:
      UserError: The processes could not connect.
    """
    if not jax.distributed.is_initialized() and (arguments := initialize_arguments(os.environ)) is not None:
        _initialize(arguments)
    if (pipe := os.environ.pop(LAUNCHER_PIPE, None)) is not None:
        threading.Thread(target=_stop_without_launcher, args=(int(pipe),), name="launcher", daemon=True).start()
    if not is_first():
        sys.stdout.flush()
        # The file descriptor and not only Python's: the collectives print their connections to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _stop_without_launcher(pipe: int) -> None:
    """End this process once the launcher is gone, whose end closes the pipe: as by SIGTERM, then by SIGKILL."""
    with contextlib.suppress(OSError):
        os.read(pipe, 1)
    # Nobody reads the output any more; writing would be an error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _initialize(arguments: dict[str, Any]) -> None:
    address = arguments.get("coordinator_address")
    if address is not None and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ and _is_loopback(address):
        # By default the coordinator, which asks for no password, listens on all interfaces.
        arguments = {**arguments, "coordinator_bind_address": address}
    try:
        jax.distributed.initialize(
            **arguments, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=_SHUTDOWN_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(
            f"the processes could not connect ({why}): fix the settings of their launcher, or set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each"
        ) from error


def _is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is an address of this machine that no other one can reach.

    >>> [_is_loopback(f"{host}:1234") for host in ("127.0.0.1", "127.9.9.9", "[::1]", "localhost", "10.0.0.1")]
    [True, True, True, True, False]
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return bool(found) and all(ipaddress.ip_address(str(place[0])).is_loopback for *_, place in found)
    except (OSError, ValueError):
        return False


def initialize_arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of `jax.distributed.initialize` for this process, from its environment variables.

    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and `JAX_COORDINATOR_ADDRESS` take precedence over the variables of Open MPI,
    Slurm and Kubernetes.

    Returns:
      The keyword arguments; None for a run of one process.

    Raises:
      UserError: The variables do not identify a process.

    Example:
      >>> initialize_arguments({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "…"})
      {'cluster_detection_method': 'ompi'}
      >>> initialize_arguments({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # in a job, but not started by srun
    """
    if _number(environment, "JAX_NUM_PROCESSES") > 1:
        return _explicit_arguments(environment, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    # Before Slurm: mpirun starts its daemons by srun.
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        if "OMPI_MCA_orte_hnp_uri" in environment:
            return {"cluster_detection_method": "ompi"}
        return _open_mpi_5(environment)
    # The size of a job step: a shell in an allocation is not one, even if SLURM_NTASKS is set.
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return {"cluster_detection_method": "slurm"}
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    # JAX uses this package to query the number of processes from the cluster's API.
    return {} if indexed and find_spec("kubernetes") else None


def _open_mpi_5(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments under Open MPI 5.0 or later, which does not give the address of its launcher."""
    arguments = _explicit_arguments(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if arguments["coordinator_address"] is None:
        if environment["OMPI_COMM_WORLD_SIZE"] != environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
            raise UserError(
                "Open MPI 5 does not say where its first process is: "
                "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT, with the first host's name and a free port"
            )
        # All on one machine: a port derived from the job, in the range that JAX uses under Open MPI 4.
        port = 2**16 - 2**12 + zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode()) % 2**12
        arguments["coordinator_address"] = f"127.0.0.1:{port}"
    return {**arguments, "local_device_ids": [_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")]}


def _explicit_arguments(environment: Mapping[str, str], size: str, rank: str) -> dict[str, Any]:
    n, i = _number(environment, size), _number(environment, rank, missing=-1)
    if not 0 <= i < n:
        raise UserError(f"{rank} must be in 0 to {n - 1} for {n} processes, got {environment.get(rank, 'nothing')}")
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if size.startswith("JAX") and not address:
        raise UserError(f"JAX_COORDINATOR_ADDRESS is not set for {n} processes: set it to HOST:PORT of the first one")
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
        raise UserError(f"{name} must be a number, got {value!r}") from None


def once(do: Callable[[], T]) -> T:
    """Run `do()` in the first process only; return its result, or raise its `UserError`, in all processes.

    The result travels as JSON through the key-value store of JAX's runtime, and not by
    `multihost_utils.broadcast_one_to_all`: that is a program over all devices, which waits for the steps dispatched
    before it, takes arrays of a shape that every process knows (a result or an error message has none), and blocks
    within the collective if the first process dies. The store needs no device, and fails when a process is dead. The
    store is in use anyway: `process_group` reads from it which process has failed.

    Example:
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
    received = json.loads(_runtime.client.blocking_key_value_get(key, _FOREVER_MS))
    if "error" in received:
        raise (RunFailed if received["status"] == RunFailed.exit_status else UserError)(received["error"])
    return received["done"]


def wait_for_all() -> None:
    """Wait, as long as it takes, until all processes have called this; a process that dies ends the wait."""
    if count() > 1:
        _runtime.client.wait_at_barrier(f"jaxtrain/all/{next(_turns)}", _FOREVER_MS)


def publish(name: str, value: str) -> None:
    """Publish a value of this process to the others, in place of an earlier one.

    Raises:
      RuntimeError: The first process, which holds the values, is gone.
    """
    _runtime.client.key_value_set(f"jaxtrain/{name}/{_runtime.process_id}", value, allow_overwrite=True)


def published(name: str) -> dict[int, str]:
    """Return the newest value of each process that has published one. Raises as `publish`."""
    values = _runtime.client.key_value_dir_get(f"jaxtrain/{name}/")
    return {int(key.rpartition("/")[2]): value for key, value in values}


def _leave(error: BaseException) -> None:
    """Report `error` to the other processes; return if this process is to raise it, else exit or raise another error.

    Nothing after this call waits for another process.
    """
    raised = error
    if not _BROKEN.search(str(error)):
        _publish("failed", error)
    elif (gone := _describe_missing()) == "interrupted":
        raised = KeyboardInterrupt()
    else:
        raised = RunFailed(f"{gone}: checkpoints are intact: continue with --resume auto")
    _publish("raised", raised)
    first, place = is_first(), f"process {_runtime.process_id} of {count()}"
    first_error = _format_error(raised) if first else _error_of_first()
    # If a process is gone, the first one waits only for the others to read its message.
    if first_error is not None and _all_arrive(_MESSAGE_SECONDS if raised is error else 1):
        jax.distributed.shutdown()  # or the runtime would abort those that the first one leaves behind
    if not first and first_error == _format_error(raised):
        _exit(_exit_status(raised))
    if not first and isinstance(raised, UserError):
        raised = type(raised)(f"{place}: {raised}")
    # At exit JAX would wait for processes that do not end; this handler runs before.
    atexit.register(_exit, _exit_status(raised))
    if raised is not error:
        raise raised from error


def _exit_status(error: BaseException) -> int:
    """Return the exit status of the command line for an error."""
    return getattr(error, "exit_status", 130 if isinstance(error, KeyboardInterrupt) else 1)


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _publish(what: str, error: BaseException) -> None:
    """Publish an error to the other processes under `what`."""
    with contextlib.suppress(RuntimeError, ValueError):  # the first one may be gone, and the store with it
        _runtime.client.key_value_set(f"jaxtrain/{what}/{_runtime.process_id}", _format_error(error))


def _error_of_first() -> str | None:
    """Return the error that the first process published, if it ends too."""
    with contextlib.suppress(RuntimeError, ValueError):
        return str(_runtime.client.blocking_key_value_get("jaxtrain/raised/0", 1000 * _MESSAGE_SECONDS))
    return None


def _all_arrive(seconds: int) -> bool:
    """Return whether all processes reach their end within `seconds`."""
    with contextlib.suppress(RuntimeError, ValueError):
        _runtime.client.wait_at_barrier("jaxtrain/raised", 1000 * seconds)
        return True
    return False


def _describe_missing() -> str:
    """Describe the process that is gone: by its published error, else by its absence from a barrier."""
    n = count()
    with contextlib.suppress(RuntimeError, ValueError):
        for key, text in _runtime.client.key_value_dir_get("jaxtrain/failed/"):
            interrupted = text.startswith(KeyboardInterrupt.__name__)
            return "interrupted" if interrupted else f"process {key.rpartition('/')[2]} of {n} has failed ({text})"
    try:
        _runtime.client.wait_at_barrier("jaxtrain/still-here", 1000 * 2 * _MESSAGE_SECONDS)
    except (RuntimeError, ValueError) as error:
        if missed := re.search(r"timed out task names:\s+((?:\d+\s+)+)", str(error)):
            silent = ", ".join(missed[1].split())
            return f"process {silent} of {n} no longer responds"
    return f"the connection to another of {n} processes is broken"
