"""Operands of low-precision programs, and the dtypes in their jaxprs."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np

from jaxtrain.program.equations import visit

F32 = jnp.ones((4, 4))


def dtypes_of(traced, name):
    """Return the dtypes of operands and results of every equation of a primitive, at any depth."""
    found = [eqn for eqn in visit(traced.jaxpr) if eqn.primitive.name == name]
    return [{v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)} for eqn in found]


def operands_of(traced, name):
    """Return the dtypes of the operands only."""
    found = [eqn for eqn in visit(traced.jaxpr) if eqn.primitive.name == name]
    return [{v.aval.dtype.name for v in eqn.invars} for eqn in found]


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Integers of at most 8 bits: no dtype rounds them, so that sums in any order agree.
W = jnp.array([[1, -1, 0, 2], [0, 1, -2, 1], [2, 0, 1, -1], [-1, 1, 0, 1]], np.float32)
X = jnp.array([[1, 0, -1, 2], [0, -2, 1, 1], [2, 1, 0, -1]], np.float32)


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), 2.0 * tangents[0]))


def low(x):
    return x.astype(jnp.bfloat16).astype(np.float32)


MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
