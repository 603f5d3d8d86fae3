"""Helpers: larger initial parameters, float64 trees, and equations of traced programs."""

import jax
import numpy as np

from jaxtrain.models import functional
from jaxtrain.program.equations import visit


def enlarged(model):
    """Return (jitted apply, params), with parameters scaled up so that no layer is close to the identity."""
    apply, params = functional(model)
    return jax.jit(apply), jax.tree.map(lambda p: p * 5, params)


def widened(tree):
    """Return a tree with floating arrays in float64 and the others unchanged."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64 if np.issubdtype(x.dtype, np.floating) else x.dtype), tree)


def assert_float64_throughout(fn, tree, *args):
    """Assert that `fn(tree, *args)` computes nothing in float32 if the arrays of `tree` are float64."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(fn)(widened(tree), *args)
    found = [v.aval.dtype.name for eqn in visit(traced.jaxpr) for v in (*eqn.invars, *eqn.outvars)]
    assert "float64" in found
    assert "float32" not in found
