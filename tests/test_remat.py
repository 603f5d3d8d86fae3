"""The laws of rematerialisation: it changes memory and time, never numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxtrain as jt
from jaxtrain import jaxpr
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.remat import POLICIES, block, remat

TOKENS = np.random.default_rng(0).integers(0, 13, size=(4, 7)).astype(np.int32)
ALL = ["none", *POLICIES]


def checkpoints(fn, *args):
    """How many checkpoint equations the jaxpr of `fn` holds, however deep."""

    def count(traced):
        inside = sum(count(inner) for eqn in traced.eqns for inner in jaxpr.inner_jaxprs(eqn))
        return inside + sum(eqn.primitive.name in ("checkpoint", "remat2") for eqn in traced.eqns)

    return count(jax.make_jaxpr(fn)(*args).jaxpr)


def test_no_policy_changes_a_bit_of_gpt2s_loss_or_gradient():
    config = GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2, dropout=0.2)
    apply, params = functional(GPT2(config, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)

    def loss(params, tokens, rng):
        return cross_entropy(apply(params, tokens[:, :-1], rng), tokens[:, 1:]).sum()

    # flax's LayerNorm relies on promotion.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        results = {
            policy: jax.jit(jax.value_and_grad(remat(loss, policy)))(params, TOKENS, jax.random.key(1))
            for policy in ALL
        }
    value, _ = results["none"]
    assert value.dtype == np.float64
    for policy in POLICIES:
        for a, b in zip(jax.tree.leaves(results[policy]), jax.tree.leaves(results["none"]), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), policy


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_comes_to_the_same_under_every_policy(precision):
    # Powers of two and small whole numbers, which no dtype and no order of adding rounds.
    def loss_fn(params, batch, rng):
        def layer(x, w):
            keep = jax.random.bernoulli(jax.random.fold_in(rng, 1), 0.8, x.shape)
            return jnp.where(keep, jax.nn.relu(x @ w), jnp.zeros_like(x)), None

        out, _ = lax.scan(block(layer), batch, params)
        return jt.Loss((out**2).sum(), len(batch)), {}

    params = np.random.default_rng(0).integers(-1, 2, size=(3, 4, 4)).astype(np.float32)
    batch = np.random.default_rng(1).integers(-1, 2, size=(8, 4)).astype(np.float32)
    states = []
    for policy in ALL:
        step = jt.train_step(loss_fn, optax.sgd(0.5), precision=precision, accumulate=2, remat=policy)
        states.append(step(step.init(params), batch))
    assert not np.array_equal(states[0][0].params, params)
    for state, metrics in states[1:]:
        np.testing.assert_array_equal(metrics["loss"], states[0][1]["loss"])
        np.testing.assert_array_equal(state.params, states[0][0].params)


def deep(x, layers, mark):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

    return lax.scan(mark(layer), x, layers)[0].sum()


def compiled(policy, mark=block, depth=16):
    fn = jax.jit(jax.grad(remat(lambda x, layers: deep(x, layers, mark), policy), argnums=1))
    return fn.lower(jnp.ones((256, 8)), jnp.ones((depth, 8, 64))).compile()


def test_memory_falls_with_what_is_kept():
    temporaries = {policy: compiled(policy).memory_analysis().temp_size_in_bytes for policy in ALL}
    carries = 16 * 256 * 8 * 4
    # Without remat a block keeps its hidden layer too, eight times its input and more than once.
    assert temporaries["none"] > 8 * carries
    assert temporaries["full"] < 0.25 * temporaries["none"]
    assert temporaries["full"] < temporaries["dots_no_batch"] <= temporaries["dots"] < temporaries["none"]


def test_a_marker_costs_nothing():
    marked, bare = (compiled("none", mark) for mark in (block, lambda fn: fn))
    assert marked.memory_analysis().temp_size_in_bytes == bare.memory_analysis().temp_size_in_bytes
    assert marked.cost_analysis()["flops"] == bare.cost_analysis()["flops"]


def test_none_returns_the_function_itself():
    assert remat(deep, "none") is deep


@pytest.mark.parametrize("policy", POLICIES)
def test_marked_blocks_alone_are_checkpointed_or_else_the_whole(policy):
    def one(x):
        return jnp.sin(x)

    def three_of_which_two_marked(x):
        return block(one)(jnp.exp(block(one)(x)))

    def scanned(x):
        return lax.scan(lambda x, _: (block(one)(x), None), x, None, length=5)[0]

    def nested(x):
        return jax.jit(lambda x: lax.cond(x > 0, block(one), one, x))(x)

    assert checkpoints(remat(three_of_which_two_marked, policy), 1.0) == 2
    assert checkpoints(remat(scanned, policy), 1.0) == 1
    assert checkpoints(remat(nested, policy), 1.0) == 1
    (eqn,) = jax.make_jaxpr(remat(lambda x: one(one(x)), policy))(1.0).eqns
    assert eqn.primitive.name in ("checkpoint", "remat2")
    assert eqn.params["policy"] is POLICIES[policy]
    assert checkpoints(three_of_which_two_marked, 1.0) == 0


def saved(policy):
    """The shapes a block keeps for its backward pass, of [4, 8] @ [8, 8] and a batched [2, 2, 8] @ [2, 8, 8]."""

    def fn(w, x):
        y = jnp.sin(x @ w).reshape(2, 2, 8)
        return jnp.sin(jnp.einsum("bij,bkj->bik", y, y)).sum()

    _, pullback = jax.vjp(remat(lambda w, x: block(fn)(w, x), policy), jnp.ones((8, 8)), jnp.ones((4, 8)))
    return sorted(x.shape for x in jax.tree.leaves(pullback) if np.ndim(x))


def test_a_policy_keeps_what_its_name_says():
    arguments = [(4, 8), (8, 8)]
    assert saved("full") == arguments
    assert saved("dots_no_batch") == sorted([*arguments, (4, 8)])
    assert saved("dots") == sorted([*arguments, (4, 8), (2, 2, 2)])


def test_an_unknown_policy_is_the_users_error_that_lists_the_known():
    with pytest.raises(jt.UserError, match=r"remat 'dot' is unknown: choose one of none, full, dots, dots_no_batch"):
        remat(deep, "dot")
