"""Programs are the same whatever JAX's flags for the newer implementations of checkpoints, derivatives and scans."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.cost.flops import flops
from jaxtrain.program.equations import visit
from jaxtrain.program.internals import INTERNALS, OF_HIJAX, _config, missing_internals
from tests.passes.test_control_flow import in_custom_jvp, in_custom_vjp, in_nest, in_part_of_checkpoint

FLAGS = [name for name in OF_HIJAX if hasattr(_config, name)]
PARAMS = {"up": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "down": np.ones((4, 3), np.float32)}
BATCH = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)


@contextlib.contextmanager
def switched(names, value):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(getattr(_config, name)(value))
        yield


def fresh(fn):
    """Return the same function, of which JAX has traced nothing."""
    return lambda *args: fn(*args)


@jax.custom_vjp
def clipped(x):
    return x.clip(-0.5, 0.5)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(abs(x) > 0.5, 0.1 * g, g),))


@jax.checkpoint
def layer(x, params):
    return x + clipped(jax.nn.relu(x @ params["up"])) @ params["down"]


@jt.block
def scanned(x, params):
    return jax.lax.scan(lambda x, _: (jax.nn.silu(layer(x, params)), None), x, length=2)[0]


def summed_and_differentiated(fn):
    return jax.value_and_grad(lambda x, w: fn(x, w).astype(np.float32).sum(), argnums=(0, 1))


def loss_fn(params, batch, rng):
    return jt.Loss((scanned(batch, params) ** 2).sum(), len(batch)), {}


@pytest.mark.parametrize("flags", [[name] for name in FLAGS] + [FLAGS], ids="+".join)
def test_a_step_is_the_same_program(flags):
    texts, states = [], []
    for value in (False, True):
        with switched(flags, value):
            step = jt.train_step(fresh(loss_fn), optax.adam(0.1), precision="fp16", remat="dots", accumulate=2)
            state = step.init(PARAMS)
            traced = jax.make_jaxpr(step.pure)(state, BATCH)
            texts.append([eqn.primitive.name for eqn in visit(traced.jaxpr)])
            states.append(step(state, BATCH)[0].params)
    assert texts[0] == texts[1]
    assert "call_hi_primitive" not in texts[1]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize("fn", [in_custom_jvp, in_custom_vjp, in_nest, in_part_of_checkpoint])
def test_a_function_under_autocast_is_the_same(fn):
    x, w = BATCH, np.ones((3, 3), np.float32)
    found, counts = [], []
    for value in (False, True):
        with switched(FLAGS, value):
            found.append(jax.jit(summed_and_differentiated(jt.autocast(fresh(fn), jnp.bfloat16)))(x, w))
            counts.append(flops(fresh(fn), x, w))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert counts[0] == counts[1] > 0


def test_the_doctor_finds_the_same_internals():
    before = missing_internals(INTERNALS)
    with switched(FLAGS, True):
        assert missing_internals(INTERNALS) == before


@pytest.mark.skipif(not hasattr(clipped, "defremat"), reason="defremat is new in JAX 0.12")
def test_rules_for_one_implementation_alone_are_refused():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defremat(lambda x: (jnp.sin(x), None), lambda _, x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    with switched(FLAGS, True), pytest.raises(jt.UserError, match="give it rules of defvjp too"):
        jt.autocast(sine, jnp.bfloat16)(jnp.ones(3))
