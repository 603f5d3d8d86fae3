"""The environment of a process determines the arguments of `jax.distributed.initialize`."""

import re

import pytest

from jaxtrain.distributed import processes
from jaxtrain.distributed.processes import initialize_arguments
from jaxtrain.errors import UserError


def test_the_environment_gives_the_arguments_of_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3", "JAX_COORDINATOR_ADDRESS": "h:1"}
    given = {
        "coordinator_address": "h:1",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
    }
    open_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}
    kubernetes = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}

    assert initialize_arguments({}) is None
    assert initialize_arguments({**ours, "JAX_NUM_PROCESSES": "1"}) is None
    assert initialize_arguments(ours) == given
    assert initialize_arguments({**open_mpi, "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert initialize_arguments({**open_mpi, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://…"}) == {
        "cluster_detection_method": "ompi"
    }
    # mpirun starts its daemons by srun; our own variables take precedence over both.
    step = {**slurm, "SLURM_STEP_NUM_TASKS": "4"}
    assert initialize_arguments({**step, **open_mpi, "OMPI_MCA_orte_hnp_uri": "…"}) == {
        "cluster_detection_method": "ompi"
    }
    assert initialize_arguments({**step, **open_mpi, **ours}) == given
    assert initialize_arguments(step) == {"cluster_detection_method": "slurm"}
    # A job of four tasks, in an interactive shell or in its script, outside srun.
    assert initialize_arguments({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert initialize_arguments(slurm) is None

    for installed in (object(), None):
        monkeypatch.setattr(processes, "find_spec", lambda name, installed=installed: installed)
        assert initialize_arguments(kubernetes) == ({} if installed else None)
        assert initialize_arguments({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_open_mpi_5_needs_an_address_on_more_than_one_machine() -> None:
    here = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    on_one = {**here, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-h-1@1"}
    found = initialize_arguments(on_one)
    assert found
    address = found.pop("coordinator_address")
    assert found == {
        "num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate", "local_device_ids": [1]
    }  # fmt: skip
    assert re.fullmatch(r"127\.0\.0\.1:6\d{4}", address)
    assert initialize_arguments({**on_one, "PMIX_NAMESPACE": "prterun-h-2@1"}) != {
        **found,
        "coordinator_address": address,
    }
    on_two = {**here, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UserError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        initialize_arguments(on_two)
    assert initialize_arguments({**on_two, "JAX_COORDINATOR_ADDRESS": "h:1"}) == {**found, "coordinator_address": "h:1"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES must be a number, got 'two'"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID must be in 0 to 1 for 2 processes, got nothing"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID must be in 0 to 1 for 2 processes, got 2"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "JAX_COORDINATOR_ADDRESS is not set for 2 processes: set it to HOST:PORT of the first one",
        ),
    ],
)
def test_incomplete_settings_of_a_process_raise_an_error(extra: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        initialize_arguments(extra)
