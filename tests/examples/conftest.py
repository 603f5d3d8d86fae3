"""JAX's default promotion, as users have it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def users_may_promote():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
