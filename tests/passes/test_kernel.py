"""Kernels and operations with a low-precision kernel are compiled and registered once, and freed."""

import functools
import gc
import weakref

import jax.numpy as jnp

import jaxtrain as jt
from jaxtrain.passes.numerics import autocast as precision


def test_a_kernel_is_compiled_once_for_eager_calls():
    traces = []

    def traced(x, scale=1.0):
        traces.append(1)
        return scale * x

    x = jnp.ones(3)
    for _ in range(3):
        jt.kernel(traced)(x)
    assert len(traces) == 1
    for scale in (2.0, 2.0, 3.0):
        assert float(jt.kernel(functools.partial(traced, scale=scale))(x)[0]) == scale
    assert len(traces) == 3


def test_a_wrapper_does_not_share_the_kernel_of_the_function_it_wraps():
    def single(x):
        return x

    assert float(jt.kernel(single)(1.0)) == 1

    @functools.wraps(single)  # copies the attributes of `single`
    def double(x):
        return 2 * single(x)

    assert float(jt.kernel(double)(1.0)) == 2


def test_marked_functions_are_freed():
    def marked(mark):
        def fn(x):
            return x + 1

        mark(fn)(jnp.ones(3))
        return weakref.ref(fn)

    known = len(precision._LOW_OPERATIONS)
    # All is in the youngest generation: a collection of every object takes seconds in a long session.
    gc.disable()
    references = [marked(jt.kernel), marked(lambda fn: precision.low_precision(fn, fn))]
    gc.collect(0)
    gc.enable()
    assert [reference() for reference in references] == [None, None]
    assert len(precision._LOW_OPERATIONS) == known


def test_a_low_precision_operation_is_registered_once():
    def product(x):
        return x @ x

    assert precision.low_precision(product, product) is precision.low_precision(product, product)
