"""A run does not start on a JAX that computes a program wrongly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.debug import installation, miscompiled
from jaxtrain.errors import UserError
from jaxtrain.recipes.image import MLPRecipe


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxtrain" / "compiler"


@pytest.fixture
def wrong_rows(monkeypatch):
    """A compiler that computes the last rows of a sum wrongly."""

    def program():
        found, expected = miscompiled.sums_of_products()
        return found.at[-5:].multiply(1.01), expected

    monkeypatch.setattr(miscompiled, "PROGRAMS", {**miscompiled.PROGRAMS, "sums of products of rows": program})
    monkeypatch.setattr(miscompiled.miscompiled, "__defaults__", (miscompiled.PROGRAMS,))


def test_errors_of_one_row_and_nan_are_seen():
    rows = np.ones(40_000)
    assert miscompiled.error(lambda: (jnp.ones(40_000), rows)) == 0
    assert miscompiled.error(lambda: (jnp.ones(40_000).at[39_999].set(1.001), rows)) > miscompiled.BOUND
    names = miscompiled.miscompiled(jax.devices()[0], {"nan": lambda: (jnp.ones(3).at[1].set(jnp.nan), np.ones(3))})
    assert names == ["nan"]


def test_a_run_is_refused_before_anything_is_written(wrong_rows, cache, tmp_path):
    with pytest.raises(UserError, match=r"computes wrong numbers on this cpu \(sums of products of rows\): .* pip"):
        jt.fit(MLPRecipe(steps=1), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    assert not cache.exists()
    (found,) = installation.programs(jax.devices()[0])
    assert found.status == "problem"
    assert "sums of products of rows" in found.message


def test_programs_run_once_for_each_compiler(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(miscompiled, "miscompiled", lambda device: calls.append(device) or [])
    device = jax.devices()[0]
    for _ in range(2):
        assert miscompiled.miscompiled_once(device) == []
    assert len(calls) == len([*cache.iterdir()]) == 1
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    miscompiled.miscompiled_once(device)
    assert len(calls) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/cache")
    for _ in range(2):
        miscompiled.miscompiled_once(device)
    assert len(calls) == 4
