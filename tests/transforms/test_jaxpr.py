"""The evaluation of a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.transforms import jaxpr


def test_a_numpy_constant_has_the_dtype_of_the_mode_whichever_mode_traced_it_first() -> None:
    table = np.array([1.0, 0.5])

    def fn(x: jax.Array) -> jax.Array:
        return (jnp.arange(2)[:, None] * table) @ x

    plain = jaxpr.transform(fn, lambda eqn, args, run: jaxpr.bind(eqn, args))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with jax.enable_x64(True):
            wide = jax.jit(fn)(np.ones(2))
        with jax.enable_x64(False):
            narrow = jax.jit(plain)(np.ones(2, np.float32))
    assert (wide.dtype, narrow.dtype) == (np.float64, np.float32)
