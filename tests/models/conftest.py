"""Fixtures of the models' tests."""

import jax
import numpy as np
import pytest


@pytest.fixture
def drawn_masks(monkeypatch):
    """Record the key, as bytes, and the shape of every dropout mask, in order."""
    drawn = []
    bernoulli = jax.random.bernoulli

    def recorded(key, p, shape):
        drawn.append((np.asarray(jax.random.key_data(key)).tobytes(), shape))
        return bernoulli(key, p, shape)

    monkeypatch.setattr(jax.random, "bernoulli", recorded)
    return drawn
