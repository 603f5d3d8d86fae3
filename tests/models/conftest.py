"""What models draw."""

import jax
import numpy as np
import pytest


@pytest.fixture
def drawn_masks(monkeypatch):
    """The key, as bytes, and the shape of every dropout mask from here on, in order."""
    drawn = []
    bernoulli = jax.random.bernoulli

    def recorded(key, p, shape):
        drawn.append((np.asarray(jax.random.key_data(key)).tobytes(), shape))
        return bernoulli(key, p, shape)

    monkeypatch.setattr(jax.random, "bernoulli", recorded)
    return drawn
