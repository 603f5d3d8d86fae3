"""GPUs to compile for that need not be there."""

import dataclasses

import pytest

from jaxtrain.cost.gpu import TARGETS, gpu_devices


@pytest.fixture(scope="session")
def gpus():
    """Return a function that returns `count` GPUs of a compute capability."""
    pytest.importorskip("jax_plugins.xla_cuda12")

    def describe(major, minor=0, count=1):
        return gpu_devices(dataclasses.replace(TARGETS["a100"], capability=(major, minor)), count)

    return describe
