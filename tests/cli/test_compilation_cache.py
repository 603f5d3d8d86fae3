"""The compilation cache of the commands has a limited size."""

import os

import jax
import pytest

from jaxtrain.cli import compilation_cache
from jaxtrain.cli.compilation_cache import enable_compilation_cache


@pytest.fixture(autouse=True)
def settings():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def fill(folder):
    folder.mkdir(parents=True)
    for age in range(4):
        path = folder / f"jit_{age}-cache"
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 - age, 1e9 - age))


def test_the_oldest_programs_of_the_users_cache_are_removed(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "MAX_BYTES", 2500)
    fill(tmp_path / "jaxtrain" / "xla")
    assert enable_compilation_cache() == tmp_path / "jaxtrain" / "xla"
    assert sorted(p.name for p in (tmp_path / "jaxtrain" / "xla").iterdir()) == ["jit_0-cache", "jit_1-cache"]
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxtrain" / "xla")


def test_a_folder_that_the_user_specifies_is_not_pruned(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(compilation_cache, "MAX_BYTES", 2500)
    fill(tmp_path / "own")
    assert enable_compilation_cache() == tmp_path / "own"
    assert len(list((tmp_path / "own").iterdir())) == 4
