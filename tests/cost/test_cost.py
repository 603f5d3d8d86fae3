"""FLOPs and memory of a window: those of k micro-batches and one update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxtrain as jt
from jaxtrain.cost.flops import flops
from jaxtrain.optim import adamw
from jaxtrain.passes.policies import policy
from jaxtrain.program.equations import inner_jaxprs

WIDTH, ROWS = 192, 8
PARAMS = jax.ShapeDtypeStruct((3, WIDTH, WIDTH), np.float32)
PARAM_BYTES = 4 * 3 * WIDTH**2


def loss_fn(params, batch, rng):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
    return jt.Loss((x**2).sum(), weight=len(batch)), {}


def abstract(k, precision="fp32"):
    step = jt.train_step(loss_fn, adamw(1e-3), accumulate=k, clip_norm=1.0, precision=precision)
    state = jax.eval_shape(lambda: step.init(jnp.zeros(PARAMS.shape)))
    return step, state, jax.ShapeDtypeStruct((k * ROWS, WIDTH), np.float32)


def elements(jaxpr, name):
    """Return the number of elements that a primitive computes, including all iterations of loops."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = sum(elements(j, name) for j in inner_jaxprs(eqn))
        total += inner * eqn.params["length"] if eqn.primitive.name == "scan" else inner
        total += eqn.outvars[0].aval.size if eqn.primitive.name == name else 0
    return total


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_the_flops_of_a_window_are_those_of_its_micro_batches(k, precision):
    single, window = abstract(1, precision), abstract(k, precision)
    assert flops(window[0].pure, *window[1:]) == k * flops(single[0].pure, *single[1:])


@pytest.mark.parametrize("k", [1, 4])
def test_the_optimizer_runs_once_per_window(k):
    step, state, batch = abstract(k)
    # Only Adam computes square roots of whole parameters.
    roots = elements(jax.make_jaxpr(step.pure)(state, batch).jaxpr, "sqrt")
    size = np.prod(PARAMS.shape)
    assert size <= roots < 1.01 * size


def temporaries(fn, *args):
    return jax.jit(fn, donate_argnums=0).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_window_needs_at_most_one_buffer_more_than_a_plain_scan_and_one_update(precision):
    k, optimizer = 4, optax.adam(1e-3)
    loss = policy(precision).apply(lambda params, batch: loss_fn(params, batch, None)[0].total)

    def plain(state, batch):
        params, opt_state = state

        def add(total, micro_batch):
            return total + jax.grad(loss)(params, micro_batch), None

        total, _ = lax.scan(add, jnp.zeros_like(params), batch.reshape(k, ROWS, WIDTH))
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(total / (k * ROWS), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.zeros(PARAMS.shape)
    batch = jnp.zeros((k * ROWS, WIDTH))
    step = jt.train_step(loss_fn, optimizer, accumulate=k, precision=precision)
    ours = step.jitted.lower(step.init(params), batch).compile().memory_analysis().temp_size_in_bytes
    assert ours <= temporaries(plain, (params, optimizer.init(params)), batch) + PARAM_BYTES
