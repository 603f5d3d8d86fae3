"""Meshes of CPUs turn JAX's persistent compilation cache off: other tests of the process are to have it."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def _compilation_cache():
    before = jax.config.jax_enable_compilation_cache
    yield
    if jax.config.jax_enable_compilation_cache != before:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield
