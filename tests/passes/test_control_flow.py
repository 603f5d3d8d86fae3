"""Autocast inside control flow, custom derivatives and `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax import lax
from jax.experimental import xla_metadata

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.program import rewrite
from jaxtrain.program.equations import visit
from tests.passes.operands import MESH, ROWS, WHOLE, W, X, assert_same_bits, dtypes_of, rounded


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scaled(factor, x, y, n):
    return factor * x + y * n.astype(y.dtype)


@scaled.defjvp
def scaled_jvp(factor, primals, tangents):
    x, y, n = primals
    # A custom rule: the gradient of x is three times the true one.
    return scaled(factor, x, y, n), 3 * factor * tangents[0] + tangents[1] * n.astype(y.dtype)


@jax.custom_vjp
def reversed_gradient(x, w):
    return x @ w


reversed_gradient.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (-g @ saved[1].T, -saved[0].T @ g))


def in_jit(x, w):
    return jax.jit(lambda x: jax.nn.relu(x @ w))(x)


def in_scan(x, w):
    carry, ys = lax.scan(lambda c, scale: (c + scale * (x @ w), x @ w), jnp.zeros_like(x), jnp.arange(2.0))
    return carry + ys.sum(0)


def in_reverse_scan(x, w):
    return lax.scan(lambda c, row: (c + row, c[None] @ w), x[0], x, reverse=True, unroll=2)[1][:, 0]


def in_map(x, w):
    return lax.map(lambda row: row @ w, x)


def in_fori(x, w):
    return lax.fori_loop(0, 2, lambda i, c: c + x @ w, x)


def in_while(x, w):
    def grow(carry):
        steps, grown = carry
        return steps + 1, grown + jnp.abs(W @ W)

    steps, _ = lax.while_loop(lambda carry: carry[1][0, 0] < 4, grow, (0, jnp.zeros_like(W)))
    return (x @ w) * steps.astype(x.dtype)


def in_cond(x, w):
    return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)


def in_switch(x, w):
    return lax.switch(jnp.int32(1), [lambda x: x, lambda x: x @ w, lambda x: -x], x)


def in_checkpoint(x, w):
    return jax.checkpoint(lambda x: jax.nn.relu(x @ w) @ w)(x)


def in_part_of_checkpoint(x, w):
    """Compute what differentiation splits off a checkpoint: an equation that evaluates the forward pass."""
    inner = jax.checkpoint(lambda x: lax.scan(lambda c, _: (c @ w, None), x, length=2)[0])
    return jax.vjp(inner, x)[0]


@jax.custom_batching.custom_vmap
def mapped_product(x, w):
    return x @ w


mapped_product.def_vmap(lambda size, batched, x, w: (x @ w, True))


def in_block(x, w):
    return jt.block(lambda x, w: x @ w)(x, w)


def in_custom_jvp(x, w):
    return rounded(x @ w)


def in_custom_jvp_of_some(x, w):
    return scaled(2.0, x @ w, lax.stop_gradient(x), jnp.int32(3))


def in_custom_vjp(x, w):
    return reversed_gradient(x, w)


def in_nest(x, w):
    def one():
        return rounded(jax.jit(jnp.matmul)(x, w))

    def other():
        return scaled(1.0, x, x @ w, jnp.int32(1))

    body = jax.checkpoint(lambda carry, which: (carry, lax.cond(which > 0, one, other)))
    return jax.vmap(lambda which: lax.scan(body, 0.0, which[None])[1][0])(jnp.arange(2.0)).sum(0)


def in_shard_map(x, w):
    def local(x, w):
        return lax.psum((x @ w).sum(0), "data")

    return jax.shard_map(local, mesh=MESH, in_specs=(ROWS, WHOLE), out_specs=WHOLE)(jnp.concatenate([x, x, x, x]), w)


CONTROL_FLOW = [
    in_jit, in_scan, in_reverse_scan, in_map, in_fori, in_while, in_cond, in_switch, in_checkpoint,
    in_part_of_checkpoint, in_block, in_custom_jvp, in_custom_jvp_of_some, in_custom_vjp, in_nest,
    in_shard_map,
]  # fmt: skip


def value_and_gradients(fn):
    return jax.value_and_grad(lambda x, w: fn(x, w).sum(), argnums=(0, 1))


@pytest.mark.parametrize("fn", CONTROL_FLOW)
def test_autocast_applies_inside_control_flow_with_correct_gradients(fn):
    cast = autocast(fn, jnp.bfloat16)
    traced = jax.make_jaxpr(value_and_gradients(cast))(X, W)
    found = dtypes_of(traced, "dot_general")
    assert len(found) >= 3
    assert all(dtypes == {"bfloat16"} for dtypes in found)
    value, gradients = jax.jit(value_and_gradients(cast))(X, W)
    plain_value, plain_gradients = jax.jit(value_and_gradients(fn))(X, W)
    assert_same_bits((value.astype(np.float32), gradients), (plain_value, plain_gradients))


def with_metadata(x, w):
    call = getattr(xla_metadata, "xla_metadata_call", None)  # since JAX 0.12
    return x @ w if call is None else call(jnp.matmul, part="product")(x, w)


@pytest.mark.parametrize("fn", [lax.composite(jnp.matmul, "product"), mapped_product, with_metadata])
def test_a_function_with_a_rule_for_others_is_computed_by_itself(fn):
    cast = autocast(fn, jnp.bfloat16)
    assert dtypes_of(jax.make_jaxpr(cast)(X, W), "dot_general") == [{"bfloat16"}]


def test_an_operation_with_a_program_of_its_own_keeps_its_dtypes():
    def root(x):
        return lax.custom_root(lambda y: y - x, x, lambda f, y: jnp.float32(2) * y - f(y), lambda g, y: y / g(1.0))

    x = jnp.float32(3)
    found = jax.jit(autocast(lambda x: root(x.astype(jnp.bfloat16).astype(np.float32)), jnp.bfloat16))(x)
    assert (found.dtype, float(found)) == (np.float32, float(root(x)))


@pytest.mark.parametrize("fn", CONTROL_FLOW)
def test_a_rule_that_returns_none_changes_no_bit(fn):
    same = rewrite.transform(fn, lambda eqn, args, run: None)
    x, w = X * 0.3 + 0.1, W * 0.7 - 0.2
    assert_same_bits(jax.jit(value_and_gradients(same))(x, w), jax.jit(value_and_gradients(fn))(x, w))
    assert_same_bits(same(x, w), fn(x, w))


@pytest.mark.parametrize("fn", [in_nest, in_scan, in_checkpoint])
def test_grad_vmap_and_jit_agree_in_any_order(fn):
    cast = autocast(fn, jnp.bfloat16)
    grad = jax.grad(lambda x, w: cast(x, w).sum(), argnums=(0, 1))
    xs = jnp.stack([X, 2 * X, -X])
    one_by_one = [grad(x, W) for x in xs]
    expected = jax.tree.map(lambda *g: jnp.stack(g), *one_by_one)
    for transformed in (
        jax.vmap(grad, (0, None)),
        jax.jit(jax.vmap(grad, (0, None))),
        jax.vmap(jax.jit(grad), (0, None)),
        jax.vmap(jax.grad(lambda x, w: jax.jit(cast)(x, w).sum(), argnums=(0, 1)), (0, None)),
        autocast(jax.vmap(jax.grad(lambda x, w: fn(x, w).sum(), argnums=(0, 1)), (0, None)), jnp.bfloat16),
    ):
        gradients = jax.tree.map(lambda g: g.astype(np.float32), transformed(xs, W))
        assert_same_bits(gradients, expected)
    jvp = jax.jit(lambda: jax.jvp(lambda x: cast(x, W).sum(), (X,), (jnp.ones_like(X),))[1])()
    assert float(jvp) == float(grad(X, W)[0].sum())


def test_custom_derivative_rules_are_preserved():
    # At 0 relu's custom rule has slope 0, the maximum inside it 1/2; the other rules are deliberately wrong.
    zeros = jnp.zeros((2, 2))
    assert_same_bits(jax.grad(lambda x: autocast(jax.nn.relu, jnp.bfloat16)(x).sum())(zeros), zeros)
    gradient = jax.grad(lambda x: autocast(in_custom_jvp_of_some, jnp.bfloat16)(x, jnp.eye(4)).sum())(X)
    assert_same_bits(gradient, jnp.full_like(X, 6.0))
    gradient = jax.grad(lambda x: autocast(in_custom_vjp, jnp.bfloat16)(x, jnp.eye(4)).sum())(X)
    assert_same_bits(gradient, jnp.full_like(X, -1.0))


def test_the_users_checkpoints_and_their_policies_are_preserved():
    policy = jax.checkpoint_policies.dots_saveable
    checkpointed = jax.checkpoint(lambda x: jnp.sin(x @ W), policy=policy, prevent_cse=False)
    cast = autocast(lambda x: lax.scan(lambda c, _: (checkpointed(c), None), x, None, length=3)[0], jnp.bfloat16)
    (eqn,) = (e for e in visit(jax.make_jaxpr(cast)(X).jaxpr) if e.primitive.name in ("checkpoint", "remat2"))
    assert eqn.params["policy"] is policy
    assert eqn.params["prevent_cse"] is False


def test_closed_over_and_traced_values_are_cast_too():
    @jax.jit
    def outer(w):
        return autocast(lambda x: x @ w, jnp.bfloat16)(X)

    assert dtypes_of(jax.make_jaxpr(outer)(W), "dot_general") == [{"bfloat16"}]
    gradient = jax.grad(lambda w: outer(w).sum().astype(np.float32))(W)
    assert_same_bits(gradient, jnp.broadcast_to(X.sum(0)[:, None], W.shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_autocast_equals_the_casts_written_by_hand(dtype):
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(4, 8)), "b": random.normal(size=(1, 8)), "v": random.normal(size=(8, 3))}
    params = jax.tree.map(lambda p: p.astype(np.float32), params)
    x, labels = random.normal(size=(5, 4)).astype(np.float32), np.arange(5) % 3

    def plain(params):
        hidden = jax.nn.relu(x @ params["w"]) * 0.5
        return cross_entropy(hidden @ params["v"] + params["b"][:, :3], labels).sum()

    def by_hand(params):
        low = jax.tree.map(lambda p: p.astype(dtype), params)
        hidden = jax.nn.relu(jnp.matmul(x.astype(dtype), low["w"], preferred_element_type=dtype)) * 0.5
        logits = jnp.matmul(hidden, low["v"], preferred_element_type=dtype).astype(np.float32)
        return cross_entropy(logits + params["b"][:, :3], labels).sum()

    # Eagerly, so that the compiler keeps every rounding.
    assert_same_bits(jax.value_and_grad(autocast(plain, dtype))(params), jax.value_and_grad(by_hand)(params))
