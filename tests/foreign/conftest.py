"""Foreign models are written for JAX's default promotion, which the other tests forbid."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _implicit_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
