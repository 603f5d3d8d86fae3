"""Programs with collectives bypass the persistent compilation cache on CPUs; everything else still uses it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxtrain as jt
from jaxtrain.distributed import bypass_compilation_cache, make_mesh, shard

# What JAX compiles to place arrays: programs without collectives.
EAGER = {"jit__multi_slice", "jit_broadcast_in_dim", "jit_convert_element_type", "jit_dynamic_slice"}


@pytest.fixture
def cached(tmp_path):
    """The names of the programs in an empty persistent cache."""
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield lambda: {path.name.partition("-")[0] for path in tmp_path.glob("*-cache")}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def loss_fn(params, batch, rng):
    return jt.Loss(((batch @ params - 1) ** 2).sum(), weight=len(batch)), {}


def test_making_a_mesh_leaves_the_settings_of_jax_as_they_were():
    before = dict(jax.config.values)
    make_mesh("data=2,fsdp=2")
    assert dict(jax.config.values) == before


def test_a_step_on_a_mesh_is_compiled_outside_the_cache_and_other_programs_in_it(cached):
    before = dict(jax.config.values)
    step = shard(jt.train_step(loss_fn, optax.sgd(0.1), allow_recompile=1), make_mesh("data=2,fsdp=2"))
    state, batch = step.init(jnp.zeros(4)), jnp.ones((8, 4))
    step.compile(state, batch)
    for rows in (8, 4):  # the second batch compiles inside a call
        state, _ = step(state, batch[:rows])
    assert cached() <= EAGER
    assert dict(jax.config.values) == before

    jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert "jit__lambda" in cached()


def test_nested_contexts_restore_the_setting_at_the_last_exit():
    mesh = make_mesh()
    with bypass_compilation_cache(mesh):
        with bypass_compilation_cache(mesh):
            assert not jax.config.jax_enable_compilation_cache
        assert not jax.config.jax_enable_compilation_cache
    assert jax.config.jax_enable_compilation_cache
    with bypass_compilation_cache(make_mesh("data=1", jax.devices()[:1])), bypass_compilation_cache(None):
        assert jax.config.jax_enable_compilation_cache
