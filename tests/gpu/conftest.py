"""Tests that need a GPU: `JAX_PLATFORMS=cuda pytest -n0 -m gpu`, in a process of their own."""

import jax
import pytest


@pytest.fixture(autouse=True)
def gpu() -> jax.Device:
    """The first GPU; without one the test is skipped."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.skip(f"needs a GPU, but JAX runs on the {device.platform}: JAX_PLATFORMS=cuda pytest -n0 -m gpu")
    return device


@pytest.fixture
def uncached():
    """Compile every program again, as a process on another machine does."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    yield jax.clear_caches
    jax.config.update("jax_enable_compilation_cache", enabled)
