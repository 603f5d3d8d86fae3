"""Per-block arrays: every marked block gets its own slice, wherever it is in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import UserError, block
from jaxtrain.passes import at_blocks, count_blocks


def _model(x, ws):
    """Compute 1 + 1 + 2·(1 + 2) + 1 = 9 blocks: plain, checkpointed, in nested scans, jitted; none in a cond."""
    add = block(lambda x, w: x + w)
    x = add(x, ws[0])
    x = jax.checkpoint(lambda x: add(x, ws[1]))(x)

    def outer(x, w):
        x = add(x, w)
        return jax.lax.scan(lambda x, v: (add(x, v), x), x, jnp.stack([w, 2 * w]))[0], None

    x, _ = jax.lax.scan(outer, x, ws, reverse=True)
    x = jax.lax.cond(x > 0, lambda x: add(x, 0.0), lambda x: x, x)
    return jax.jit(lambda x: add(x, 0.0))(x)


def test_every_block_gets_its_own_slice_in_program_order():
    x, ws = jnp.float32(1.0), jnp.array([1.0, 10.0])
    seen = []

    def record(own, call, args):
        jax.debug.callback(lambda i: seen.append(int(i)), own["i"], ordered=True)
        return [own["i"] + y for y in call(args)]

    assert count_blocks(_model, x, ws) == 9
    arrays = {"i": jnp.arange(9.0)}
    y = jax.jit(at_blocks(_model, arrays, record))(x, ws)
    jax.effects_barrier()
    assert float(y) == float(_model(x, ws)) + 36
    assert seen == [0, 1, 5, 6, 7, 2, 3, 4, 8]  # the outer scan runs in reverse: slices go by index
    gradient = jax.grad(lambda i: at_blocks(_model, i, lambda own, call, args: [own + call(args)[0]])(x, ws))
    np.testing.assert_array_equal(gradient(jnp.arange(9.0)), 1.0)


def test_another_number_of_rows_is_refused_by_the_number_of_blocks():
    with pytest.raises(UserError, match=r"^arrays are of 3 blocks, but the program has 9: pass 9 rows$"):
        at_blocks(_model, jnp.zeros(3), lambda own, call, args: call(args))(jnp.float32(1.0), jnp.ones(2))
