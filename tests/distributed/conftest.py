"""Fixtures of the tests on meshes."""

import jax
import pytest


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield
