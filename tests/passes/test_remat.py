"""Rematerialization changes memory and time, never numbers."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.passes.memory.remat import POLICIES, block, remat
from jaxtrain.program import rewrite
from jaxtrain.program.equations import visit

TOKENS = np.random.default_rng(0).integers(0, 13, size=(4, 7)).astype(np.int32)
ALL = ["none", *POLICIES]
BY_NAME = [*ALL, "names:hidden"]


def count(fn, *args, of):
    """Count equations of the given primitives in the jaxpr of `fn`, at any depth."""
    return sum(eqn.primitive.name in of for eqn in visit(jax.make_jaxpr(fn)(*args).jaxpr))


def checkpoints(fn, *args):
    return count(fn, *args, of=("checkpoint", "remat2"))


def name_products(fn):
    """Name every matrix product of `fn` "hidden"."""

    def rule(eqn, args, run):
        if eqn.primitive.name != "dot_general":
            return None
        return [checkpoint_name(out, "hidden") for out in rewrite.bind(eqn, args)]

    return rewrite.transform(fn, rule)


def gpt2_loss():
    """Return the loss of a GPT-2 with dropout, and its arguments in float64."""
    config = GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2, dropout=0.2)
    apply, params = functional(GPT2(config, rngs=nnx.Rngs(0)))

    def loss(params, tokens, rng):
        return cross_entropy(apply(params, tokens[:, :-1], rng), tokens[:, 1:]).sum()

    return loss, jax.tree.map(lambda p: np.asarray(p, np.float64), params), TOKENS, jax.random.key(1)


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param(["full", "dots", "names:hidden"], id="some"),
        pytest.param(BY_NAME[1:], id="all"),
    ],
)
def test_no_policy_changes_a_bit_of_gpt2s_loss_or_gradient(policies):
    # flax's LayerNorm relies on promotion.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        loss, *arguments = gpt2_loss()
        results = {
            policy: jax.jit(jax.value_and_grad(remat(fn, policy)))(*arguments)
            for policy in ["none", *policies]
            for fn in [name_products(loss) if policy == "names:hidden" else loss]
        }
    value, _ = results["none"]
    assert value.dtype == np.float64
    for policy in policies:
        for a, b in zip(jax.tree.leaves(results[policy]), jax.tree.leaves(results["none"]), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), policy


OF_A_USER = """
import jax
import jax.numpy as jnp
import numpy as np

from tests.passes.test_remat import gpt2_loss
from jaxtrain.passes.memory.remat import remat

with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    loss, *arguments = gpt2_loss()
    found = [jax.jit(jax.value_and_grad(remat(loss, policy)))(*arguments) for policy in ("none", "full", "dots")]
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradients)]) for _, gradients in found]
    for i in (1, 2):
        print(abs(found[i][0] / found[0][0] - 1), np.linalg.norm(flat[i] - flat[0]) / np.linalg.norm(flat[0]))
"""


def test_fused_operations_change_the_last_digits_alone():
    """With the compiler's flags that users have."""
    env = {**os.environ, "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    found = subprocess.run([sys.executable, "-c", OF_A_USER], env=env, capture_output=True, text=True, check=True)
    distances = [float(x) for x in found.stdout.split()]
    assert len(distances) == 4
    assert max(distances) <= 1e-14


PARAMS = np.random.default_rng(0).integers(-1, 2, size=(3, 4, 4)).astype(np.float32)
BATCH = np.random.default_rng(1).integers(-1, 2, size=(8, 4)).astype(np.float32)


def dropping(params, batch, rng):
    def layer(x, w):
        keep = jax.random.bernoulli(jax.random.fold_in(rng, 1), 0.8, x.shape)
        hidden = checkpoint_name(x @ w, "hidden")
        return jnp.where(keep, jax.nn.relu(hidden), jnp.zeros_like(x)), None

    out, _ = lax.scan(block(layer), batch, params)
    return jt.Loss((out**2).sum(), len(batch)), {}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_is_the_same_under_every_policy(precision):
    # Powers of two and small integers, which no dtype rounds, whatever the order of sums.
    states = []
    for policy in BY_NAME:
        step = jt.train_step(dropping, optax.sgd(0.5), precision=precision, accumulate=2, remat=policy)
        states.append(step(step.init(PARAMS), BATCH))
    assert not np.array_equal(states[0][0].params, PARAMS)
    for state, metrics in states[1:]:
        np.testing.assert_array_equal(metrics["loss"], states[0][1]["loss"])
        np.testing.assert_array_equal(state.params, states[0][0].params)


def test_a_named_value_is_saved_through_autocast_accumulation_and_scan():
    def products(policy):
        step = jt.train_step(dropping, optax.sgd(0.5), precision="bf16", accumulate=2, remat=policy)
        return count(step.pure, step.init(PARAMS), BATCH, of=("dot_general",))

    # One in the forward pass and two in its gradient; without the name, one more to recompute it.
    assert products("none") == products("names:hidden") == 3
    assert products("full") == 4


def deep(x, layers, mark):
    def layer(x, w):
        return x + jnp.tanh(checkpoint_name(jnp.sin(x @ w), "hidden") @ w.T), None

    return lax.scan(mark(layer), x, layers)[0].sum()


def compiled(policy, mark=block, depth=16):
    fn = jax.jit(jax.grad(remat(lambda x, layers: deep(x, layers, mark), policy), argnums=1))
    return fn.lower(jnp.ones((256, 8)), jnp.ones((depth, 8, 64))).compile()


def test_memory_decreases_with_the_values_saved():
    temporaries = {policy: compiled(policy).memory_analysis().temp_size_in_bytes for policy in BY_NAME}
    carries = 16 * 256 * 8 * 4
    # Without remat a block also saves its hidden layer, eight times the size of its input, more than once.
    assert temporaries["none"] > 8 * carries
    assert temporaries["full"] < 0.25 * temporaries["none"]
    assert temporaries["full"] < temporaries["dots_no_batch"] <= temporaries["dots"] < temporaries["none"]
    # "dots" saves both products of a block, the name only the input of the second.
    assert temporaries["full"] + 8 * carries <= temporaries["names:hidden"] < temporaries["dots"]


def test_a_marker_costs_nothing():
    marked, bare = (compiled("none", mark) for mark in (block, lambda fn: fn))
    assert marked.memory_analysis().temp_size_in_bytes == bare.memory_analysis().temp_size_in_bytes
    assert marked.cost_analysis()["flops"] == bare.cost_analysis()["flops"]


def test_none_returns_the_function_itself():
    assert remat(deep, "none") is deep


@pytest.mark.parametrize("policy", POLICIES)
def test_marked_blocks_are_checkpointed_or_without_any_the_whole_function(policy):
    x = jnp.eye(2)

    def one(x):
        return jnp.sin(x @ x)

    def three_of_which_two_marked(x):
        return block(one)(jnp.exp(block(one)(x)))

    def scanned(x):
        return lax.scan(lambda x, _: (block(one)(x), None), x, None, length=5)[0]

    def nested(x):
        return jax.jit(lambda x: lax.cond(x[0, 0] > 0, block(one), one, x))(x)

    assert checkpoints(remat(three_of_which_two_marked, policy), x) == 2
    assert checkpoints(remat(scanned, policy), x) == 1
    assert checkpoints(remat(nested, policy), x) == 1
    (eqn,) = jax.make_jaxpr(remat(lambda x: one(one(x)), policy))(x).eqns
    assert eqn.primitive.name in ("checkpoint", "remat2")
    assert eqn.params["policy"] is POLICIES[policy]
    assert checkpoints(three_of_which_two_marked, x) == 0


def saved_shapes(fn, policy, *args):
    """Return the shapes that `fn` saves for its backward pass."""
    _, pullback = jax.vjp(remat(fn, policy), *args)
    return sorted(x.shape for x in jax.tree.leaves(pullback) if np.ndim(x))


@block
def attending(w, x):
    """Compute a product [4, 8] @ [8, 8] and a batched one, [2, 2, 8] @ [2, 8, 2]."""
    y = checkpoint_name(jnp.sin(x @ w).reshape(2, 2, 8), "y")
    return jnp.sin(jnp.einsum("bij,bkj->bik", y, y)).sum()


def test_a_policy_saves_the_values_it_names():
    def saved(policy):
        return saved_shapes(attending, policy, *arguments)

    arguments = jnp.ones((8, 8)), jnp.ones((4, 8))
    full = [(4, 8), (8, 8)]
    assert saved("full") == full
    assert saved("dots_no_batch") == sorted([*full, (4, 8)])
    assert saved("dots") == sorted([*full, (4, 8), (2, 2, 2)])
    assert saved("names:y") == sorted([*full, (2, 2, 8)])


def convolution(x, w):
    return jnp.sin(lax.conv_general_dilated(x, w, (1,), "SAME")).sum()


def ragged(x, w):
    return jnp.sin(lax.ragged_dot(x, w, jnp.array([2, 3], jnp.int32))).sum()


def test_blocks_of_scans_compiled_for_gpus_have_no_barrier():
    def layers(x):
        return lax.scan(lambda x, _: (block(jnp.sin)(x), None), block(jnp.sin)(x), None, length=3)[0]

    def barriers(platform):
        traced = jax.make_jaxpr(remat(layers, "full", platform))(X).jaxpr
        return [eqn.params["prevent_cse"] for eqn in visit(traced) if "prevent_cse" in eqn.params]

    assert [barriers(platform) for platform in ("cpu", "gpu")] == [[True, True], [True, False]]


@pytest.mark.parametrize("policy", ["dots", "dots_no_batch"])
def test_dots_saves_low_precision_products_with_and_without_a_bias(policy):
    def mlp(x, w, b, v):
        return jnp.sin(jnp.sin(jnp.sin(x @ w + b[None]) @ v)).sum()

    arguments = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones(5), jnp.ones((5, 2))
    low = jt.autocast(mlp, jnp.bfloat16)
    products = {(4, 5), (4, 2)}
    assert not products & {*saved_shapes(low, "full", *arguments)}
    assert products < {*saved_shapes(low, policy, *arguments)}


@pytest.mark.parametrize(
    ("fn", "x", "w", "product"),
    [(convolution, (1, 2, 6), (4, 2, 3), (1, 4, 6)), (ragged, (5, 3), (2, 3, 4), (5, 4))],
)
def test_dots_saves_convolutions_and_ragged_products_too(fn, x, w, product):
    arguments = jnp.ones(x), jnp.ones(w)
    full = saved_shapes(fn, "full", *arguments)
    assert saved_shapes(fn, "dots", *arguments) == sorted([*full, product])


# --- Errors.


def test_an_unknown_policy_is_refused_with_a_list_of_the_known_ones():
    known = "none, full, dots, dots_no_batch, names:a,b, offload:a,b"
    for policy in ("dot", "names", "full:a", "none:"):
        with pytest.raises(jt.UserError, match=rf"remat '{policy}' is unknown: choose one of {known}"):
            remat(deep, policy)


@pytest.mark.parametrize("policy", ["names:", "names:a,,b", "offload: "])
def test_a_list_with_an_empty_name_is_refused(policy):
    with pytest.raises(jt.UserError, match=rf"remat '{policy}' has an empty name: list the names of"):
        remat(deep, policy)


X, X8 = jnp.eye(2), jnp.eye(8)


def two_names(x):
    named = block(lambda x: jnp.sin(checkpoint_name(x @ x, "a")))
    nested = block(lambda x: lax.scan(lambda x, _: (jnp.sin(checkpoint_name(x @ x, "b")), None), x, None, length=2)[0])
    return checkpoint_name(nested(named(x)), "outside")


def discarded(x):
    checkpoint_name(x, "a")
    return jnp.sin(x @ x)


@pytest.mark.parametrize(
    ("fn", "policy", "absent", "existing"),
    [
        (two_names, "names:a,c", "c", "a, b"),
        (two_names, "names:outside", "outside", "a, b"),
        (two_names, "offload:d,c", "c, d", "a, b"),
        (discarded, "names:a", "a", "none"),
    ],
)
def test_a_name_without_a_checkpointed_value_is_refused_with_the_existing_names(fn, policy, absent, existing):
    with pytest.raises(jt.UserError) as refused:
        remat(fn, policy)(X)
    first = absent.split(",")[0]
    assert str(refused.value) == (
        f"remat '{policy}': no checkpointed block uses a value named {absent} (named there: {existing}): "
        f"name it, h = checkpoint_name(h, '{first}')"
    )


def test_a_policy_has_to_apply_to_one_block_only():
    for policy in ("names:a", "names:b", "names: b , a"):
        assert checkpoints(remat(two_names, policy), X) == 2
    elementwise = block(jnp.sin)
    assert checkpoints(remat(lambda x: elementwise(block(jnp.dot)(x, x)), "dots_no_batch"), X) == 2
    assert checkpoints(remat(lambda x: elementwise(x @ x), "full"), X) == 1


@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        (jnp.sin, "dots"),
        (jnp.sin, "dots_no_batch"),
        (lambda x: block(jnp.sin)(x @ x), "dots"),
        (lambda x: jax.vmap(jnp.dot)(x[None], x[None]), "dots_no_batch"),
    ],
)
def test_dots_without_a_product_are_refused(fn, policy):
    with pytest.raises(jt.UserError, match=rf"remat '{policy}' saves nothing: no checkpointed block has .*; use full$"):
        remat(fn, policy)(X)


@jax.custom_vjp
def opaque(x):
    return jnp.sin(x)


opaque.defvjp(lambda x: (jnp.sin(x), (x, checkpoint_name(x @ x, "a"))), lambda saved, g: (g * saved[0] * saved[1],))


@pytest.mark.parametrize("policy", ["names:a", "dots", "dots_no_batch"])
def test_values_inside_a_custom_forward_rule_are_not_reported_as_missing(policy):
    assert len(saved_shapes(opaque, policy, X)) == len(saved_shapes(opaque, "full", X)) + 1


def device(platform, default, *others):
    kinds = [SimpleNamespace(kind=kind) for kind in (default, *others)]
    return SimpleNamespace(platform=platform, default_memory=lambda: kinds[0], addressable_memories=lambda: kinds)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (device("cpu", "device", "pinned_host"), "has no effect: the memory of .* is host memory already"),
        (device("other", "pinned_host"), "has no effect: the memory of .* is host memory already"),
        (device("other", "device", "unpinned_host"), "is not supported: .* has no pinned_host memory"),
    ],
)
def test_offload_is_refused_on_devices_without_separate_host_memory(where, reason, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [where])
    with pytest.raises(jt.UserError, match=rf"remat 'offload:a, b' {reason}; use names:a,b$"):
        remat(two_names, "offload:a, b")(X)


def pretend_to_be_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device("gpu", "device", "pinned_host")])


def test_offload_is_refused_on_the_cpu_where_xla_ignores_it(monkeypatch):
    with pytest.raises(
        jt.UserError, match=r"remat 'offload:hidden' has no effect: the memory of .* is host memory already"
    ):
        compiled("offload:hidden")
    pretend_to_be_a_gpu(monkeypatch)
    offloaded, kept = (compiled(policy).memory_analysis() for policy in ("offload:hidden", "names:hidden"))
    # Once this fails, XLA offloads on the CPU too, and the refusal can be removed.
    assert offloaded.temp_size_in_bytes == kept.temp_size_in_bytes
    assert offloaded.host_temp_size_in_bytes == 0


def test_offload_copies_named_values_to_the_host_and_back(monkeypatch):
    pretend_to_be_a_gpu(monkeypatch)
    offloaded, saved = (jax.value_and_grad(remat(attending, policy)) for policy in ("offload:y", "names:y"))
    arguments = X8, X8[:4]
    traced = jax.make_jaxpr(offloaded)(*arguments).jaxpr
    copies = [e.outvars[0].aval for e in visit(traced) if e.primitive.name == "device_put"]
    assert [(aval.shape, aval.memory_space.name) for aval in copies] == [((2, 2, 8), "Host"), ((2, 2, 8), "Device")]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(offloaded)(*arguments), jax.jit(saved)(*arguments))
