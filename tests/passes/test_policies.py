"""Policies, and a whole model under them."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.passes.memory.remat import remat as rematerialize
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.passes.policies import POLICIES, policy
from jaxtrain.program.equations import visit
from jaxtrain.run import run_policy
from tests.passes.operands import W, X, dtypes_of, operands_of

CONFIG = GPT2Config(vocab_size=19, n_positions=8, n_embd=16, n_layer=2, n_head=2, dropout=0.1)
TOKENS = np.random.default_rng(0).integers(0, 19, size=(3, 9)).astype(np.int32)


@functools.cache
def gpt2():
    apply, params = functional(GPT2(CONFIG, rngs=nnx.Rngs(0)))

    def loss(params, tokens, rng):
        return cross_entropy(apply(params, tokens[:, :-1], rng), tokens[:, 1:]).mean()

    return loss, jax.tree.map(lambda p: p * 4, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_matrix_product_of_gpt2_and_its_gradient_is_low_precision(dtype, remat):
    loss, params = gpt2()
    cast = rematerialize(autocast(loss, dtype), remat)
    traced = jax.make_jaxpr(jax.value_and_grad(cast))(params, TOKENS, jax.random.key(0))
    products = operands_of(traced, "dot_general")
    # A block has six products and the head one, each with two in its gradient; full remat repeats all of a block's
    # but the last, which no gradient needs.
    assert len(products) == 3 * 7 + (5 if remat == "full" else 0)
    assert all(dtypes == {dtype} for dtypes in products)
    for name in ("exp", "log", "reduce_sum", "rsqrt", "integer_pow"):
        assert not any(dtype in dtypes for dtypes in dtypes_of(jax.make_jaxpr(cast)(params, TOKENS, None), name))
    gradients = jax.eval_shape(jax.grad(cast), params, TOKENS, jax.random.key(0))
    assert {g.dtype.name for g in jax.tree.leaves(gradients)} == {"float32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpt2_in_low_precision_is_within_its_epsilon_of_float64(dtype):
    loss, params = gpt2()
    value, gradients = jax.jit(jax.value_and_grad(autocast(loss, dtype)))(params, TOKENS, None)
    # flax's LayerNorm relies on promotion.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        truth, exact = jax.jit(jax.value_and_grad(loss))(
            jax.tree.map(lambda p: np.asarray(p, np.float64), params), TOKENS, None
        )
    epsilon = float(jnp.finfo(dtype).eps)
    assert abs(float(value) - float(truth)) < epsilon * float(truth)

    def flat(tree):
        return np.concatenate([np.ravel(np.asarray(g, np.float64)) for g in jax.tree.leaves(tree)])

    distance = np.linalg.norm(flat(gradients) - flat(exact)) / np.linalg.norm(flat(exact))
    # The distance is that of low precision, and of at most a few roundings in a row.
    assert epsilon / 16 < distance < 4 * epsilon


def test_a_policy_keeps_master_parameters_in_float32():
    params = {"w": np.ones(2, np.float16), "n": np.arange(2), "key": jax.random.key(0)}
    for name in ("fp32", "tf32", "bf16", "fp16"):
        cast = policy(name).cast_params(params)
        assert cast["w"].dtype == np.float32
        assert cast["n"].dtype == np.int32
        assert jnp.issubdtype(cast["key"].dtype, jax.dtypes.prng_key)


def test_cast_params_copies():
    w = jnp.ones(2)
    assert policy("fp32").cast_params(w).unsafe_buffer_pointer() != w.unsafe_buffer_pointer()


def test_only_fp16_scales_its_loss():
    assert [name for name, p in POLICIES.items() if p.loss_scaling] == ["fp16"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp32", "HIGHEST"), ("fp64", "HIGHEST"), ("tf32", "HIGH"), ("bf16", "HIGHEST"), ("bf16_params", "HIGHEST")],
)
def test_float32_products_are_in_full_precision_unless_the_policy_is_tf32(name, expected):
    def float32_and_low(w):
        with jt.autocast_disabled():
            wide = w.astype(np.float32) @ w.astype(np.float32)
        return wide.sum().astype(w.dtype) + (w @ w).sum()

    with jax.enable_x64(name == "fp64"):
        traced = jax.make_jaxpr(jax.grad(policy(name).apply(float32_and_low)))(policy(name).cast_params(W[:3, :3]))
    products = [e for e in visit(traced.jaxpr) if e.primitive.name == "dot_general"]
    wide = [e for e in products if e.invars[0].aval.dtype == np.float32]
    assert (len(products), len(wide)) == (6, 6 if name in ("fp32", "tf32") else 3)
    assert {p.name for e in wide for p in e.params["precision"]} == {expected}
    low = {p.name for e in products for p in e.params["precision"] if e.invars[0].aval.dtype == jnp.bfloat16}
    assert low == ({"DEFAULT"} if name == "bf16" else {"HIGHEST"} if name == "bf16_params" else set())


def test_bf16_params_computes_and_keeps_everything_in_bfloat16():
    pure = policy("bf16_params")
    params = pure.cast_params({"w": W, "n": np.arange(2)})
    assert [p.dtype.name for p in jax.tree.leaves(params)] == ["int32", "bfloat16"]
    out = pure.apply(lambda params, x, rng: (x @ params["w"], jnp.exp(x), rng))(params, X, None)
    assert [x.dtype.name for x in out[:2]] == ["bfloat16", "bfloat16"]
    assert out[2] is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_excludes_kernels_by_patterns_where_products_are_in_8_bits(name):
    def excluded(patterns):
        return run_policy(jt.Recipe(precision=name, fp8_exclude=patterns)).fp8.exclude

    assert run_policy(jt.Recipe(precision=name)) == policy(name)
    if policy(name).fp8 is None:
        with pytest.raises(UserError, match=rf"^fp8_exclude 'head/\*' has no effect in {name}: use it with"):
            excluded("head/*")
        return
    assert [excluded(patterns) for patterns in ("head/*", "a/*,b")] == [("head/*",), ("a/*", "b")]
    for patterns in ("", ",", "head/*,", " , head/*"):
        with pytest.raises(UserError, match=r"has an empty pattern: use patterns such as 'head/\*'"):
            excluded(patterns)


def test_policies_compose():
    head = policy("fp32").apply(lambda x: x @ W)

    def body(x):
        return x @ W, head(x @ W)

    for name in ("bf16", "fp16"):
        outs = jax.eval_shape(policy(name).apply(body), X)
        assert [out.dtype.name for out in outs] == [np.dtype(policy(name).compute_dtype).name, "float32"]
    traced = jax.make_jaxpr(policy("bf16").apply(head))(X)
    (eqn,) = (e for e in visit(traced.jaxpr) if e.primitive.name == "dot_general")
    assert eqn.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
