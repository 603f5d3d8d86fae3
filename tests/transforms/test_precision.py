"""Autocast and the jaxpr rewriter under it: dtypes, control flow and gradients."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.transforms import jaxpr, precision, recomputed
from jaxtrain.transforms.policies import POLICIES, policy
from jaxtrain.transforms.precision import autocast, kernel
from jaxtrain.transforms.remat import remat as rematerialize
from tests.models.programs import equations

F32 = jnp.ones((4, 4))
IMAGE, KERNEL = jnp.ones((1, 6, 6, 2)), jnp.ones((3, 3, 2, 4))
MASK = np.tri(4, dtype=bool)


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def dtypes_of(traced, name):
    """Return the dtypes of operands and results of every equation of a primitive, at any depth."""
    found = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == name]
    return [{v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)} for eqn in found]


def operands_of(traced, name):
    """Return the dtypes of the operands only."""
    found = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == name]
    return [{v.aval.dtype.name for v in eqn.invars} for eqn in found]


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# --- Dtypes. Every function takes `low`, the output of a matrix product, and `f32`, an input.

LOW, WIDE = "low", "float32"
DTYPES = {
    "matmul": (lambda low, f32: f32 @ f32, LOW),
    "matmul of low": (lambda low, f32: low @ f32, LOW),
    "einsum": (lambda low, f32: jnp.einsum("ij,kj->ik", f32, f32), LOW),
    "batched": (lambda low, f32: jnp.einsum("bij,bjk->bik", f32[None], f32[None]), LOW),
    "matrix-vector": (lambda low, f32: f32 @ f32[0], LOW),
    "convolution": (lambda low, f32: convolve(IMAGE, KERNEL), LOW),
    "exp": (lambda low, f32: jnp.exp(low), WIDE),
    "log": (lambda low, f32: jnp.log(low), WIDE),
    "log1p": (lambda low, f32: jnp.log1p(low), WIDE),
    "expm1": (lambda low, f32: jnp.expm1(low), WIDE),
    "square": (lambda low, f32: low**2, WIDE),
    "power": (lambda low, f32: low**2.5, WIDE),
    "rsqrt": (lambda low, f32: lax.rsqrt(low), WIDE),
    "sum": (lambda low, f32: low.sum(), WIDE),
    "mean": (lambda low, f32: low.mean(axis=-1), WIDE),
    "product": (lambda low, f32: low.prod(), WIDE),
    "cumsum": (lambda low, f32: jnp.cumsum(low), WIDE),
    "variance": (lambda low, f32: low.var(axis=-1), WIDE),
    "norm": (lambda low, f32: jnp.linalg.norm(low), WIDE),
    "softmax": (lambda low, f32: jax.nn.softmax(low), WIDE),
    "log_softmax": (lambda low, f32: jax.nn.log_softmax(low), WIDE),
    "logsumexp": (lambda low, f32: jax.nn.logsumexp(low, axis=-1), WIDE),
    "cross_entropy": (lambda low, f32: cross_entropy(low, jnp.arange(4)), WIDE),
    "literal": (lambda low, f32: low * 2.0 + 1.0, LOW),
    "0-d scalar": (lambda low, f32: low * f32[0, 0], LOW),
    "negative": (lambda low, f32: -low, LOW),
    "tanh": (lambda low, f32: jnp.tanh(low), LOW),
    "sigmoid": (lambda low, f32: jax.nn.sigmoid(low), LOW),
    "sqrt": (lambda low, f32: jnp.sqrt(low), LOW),
    "relu": (lambda low, f32: jax.nn.relu(low), LOW),
    "relu6": (lambda low, f32: jax.nn.relu6(low), LOW),
    "silu": (lambda low, f32: jax.nn.silu(low), LOW),
    "maximum": (lambda low, f32: jnp.maximum(low, 0.0), LOW),
    "clip": (lambda low, f32: jnp.clip(low, -1.0, 1.0), LOW),
    "max": (lambda low, f32: low.max(axis=-1), LOW),
    "where with a literal": (lambda low, f32: jnp.where(MASK, low, 0.0), LOW),
    "where with zeros_like": (lambda low, f32: jnp.where(MASK, low, jnp.zeros_like(low)), LOW),
    "where with the least number": (lambda low, f32: jnp.where(MASK, low, jnp.finfo(low.dtype).min), LOW),
    "plus full_like": (lambda low, f32: low + jnp.full_like(low, 3.0), LOW),
    "pad": (lambda low, f32: jnp.pad(low, 1), LOW),
    "views": (lambda low, f32: low.T.reshape(2, 8)[:, ::2][None], LOW),
    "gather": (lambda low, f32: low[jnp.array([0, 2])], LOW),
    "take_along_axis": (lambda low, f32: jnp.take_along_axis(low, jnp.zeros((4, 1), int), axis=-1), LOW),
    "sort": (lambda low, f32: jnp.sort(low), LOW),
    "concatenate low": (lambda low, f32: jnp.concatenate([low, low]), LOW),
    "concatenate": (lambda low, f32: jnp.concatenate([low, f32]), WIDE),
    "add": (lambda low, f32: low + f32, WIDE),
    "multiply": (lambda low, f32: f32 * low, WIDE),
    "where": (lambda low, f32: jnp.where(MASK, low, f32), WIDE),
    "maximum of both": (lambda low, f32: jnp.maximum(low, f32), WIDE),
    "without low": (lambda low, f32: f32 * 2.0 + f32, WIDE),
    # Operations that XLA lacks in low precision run as written.
    "fft": (lambda low, f32: jnp.abs(jnp.fft.rfft(low)), WIDE),
    "cholesky": (lambda low, f32: jnp.linalg.cholesky(low), WIDE),
    "solve": (lambda low, f32: jnp.linalg.solve(low, f32), WIDE),
    "qr": (lambda low, f32: jnp.linalg.qr(low).Q, WIDE),
    "singular values": (lambda low, f32: jnp.linalg.svdvals(low), WIDE),
    "explicitly low": (lambda low, f32: f32.astype(jnp.bfloat16), "bfloat16"),
    "layer norm of low": (lambda low, f32: nnx.LayerNorm(4, rngs=nnx.Rngs(0))(low), WIDE),
    "dropout of low": (
        lambda low, f32: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, (4, 4)), low / 0.9, 0.0),
        LOW,
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("operation", DTYPES)
def test_every_operation_runs_in_its_listed_dtype(operation, dtype):
    fn, expected = DTYPES[operation]
    # Lowered, so that an operation that no backend supports fails.
    out = jax.jit(autocast(lambda x: fn(x @ x, x), dtype)).lower(F32).out_info
    assert out.dtype == (dtype if expected == LOW else expected)


def test_float16_and_bfloat16_are_promoted_to_float32():
    def fn(x):
        return x @ x, x.astype(jnp.bfloat16)

    # Traced with float32 and bfloat16 operands, which are float16 and bfloat16 under autocast.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.eval_shape(autocast(lambda x: jnp.concatenate(fn(x)), "float16"), F32)
        assert out.dtype == np.float32


def test_float64_is_unchanged():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), np.float64)
        fn = autocast(lambda x: jax.nn.softmax(jnp.tanh(x @ x) ** 2).sum(), jnp.bfloat16)
        traced = jax.make_jaxpr(fn)(x)
        assert not {v.aval.dtype.name for e in equations(traced.jaxpr) for v in e.outvars} & {"bfloat16", "float32"}
        assert_same_bits(fn(x), jax.nn.softmax(jnp.tanh(x @ x) ** 2).sum())


def test_integers_and_keys_are_unchanged():
    def fn(x, key):
        return (x @ x, x.sum(), jax.random.fold_in(key, 3), jax.random.bits(key))

    x, key = jnp.arange(16).reshape(4, 4), jax.random.key(0)
    ours, plain = autocast(fn, jnp.bfloat16)(x, key), fn(x, key)
    assert_same_bits(jax.random.key_data(ours[2]), jax.random.key_data(plain[2]))
    assert_same_bits((ours[0], ours[1], ours[3]), (plain[0], plain[1], plain[3]))


def test_outputs_are_arrays_in_the_structure_the_function_returns():
    out = autocast(lambda x: {"a": (x @ x, None), "b": [3.0, 2]}, jnp.bfloat16)(F32)
    assert jax.tree.structure(out) == jax.tree.structure({"a": (0, None), "b": [0, 0]})
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))


# --- Control flow. Integers of at most 8 bits: no dtype rounds them, so that sums in any order agree.

W = jnp.array([[1, -1, 0, 2], [0, 1, -2, 1], [2, 0, 1, -1], [-1, 1, 0, 1]], np.float32)
X = jnp.array([[1, 0, -1, 2], [0, -2, 1, 1], [2, 1, 0, -1]], np.float32)


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), 2.0 * tangents[0]))


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


MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()


def in_shard_map(x, w):
    def local(x, w):
        return lax.psum((x @ w).sum(0), "data")

    return jax.shard_map(local, mesh=MESH, in_specs=(ROWS, WHOLE), out_specs=WHOLE)(jnp.concatenate([x, x, x, x]), w)


CONTROL_FLOW = [
    in_jit, in_scan, in_reverse_scan, in_map, in_fori, in_while, in_cond, in_switch, in_checkpoint, in_block,
    in_custom_jvp, in_custom_jvp_of_some, in_custom_vjp, in_nest, in_shard_map,
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fn", CONTROL_FLOW)
def test_a_rule_that_returns_none_changes_no_bit(fn):
    same = jaxpr.transform(fn, lambda eqn, args, run: None)
    x, w = X * 0.3 + 0.1, W * 0.7 - 0.2
    assert_same_bits(jax.jit(value_and_gradients(same))(x, w), jax.jit(value_and_gradients(fn))(x, w))
    assert_same_bits(same(x, w), fn(x, w))


@pytest.mark.sampled(1)
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
    (eqn,) = (e for e in equations(jax.make_jaxpr(cast)(X).jaxpr) if e.primitive.name in ("checkpoint", "remat2"))
    assert eqn.params["policy"] is policy
    assert eqn.params["prevent_cse"] is False


def test_closed_over_and_traced_values_are_cast_too():
    @jax.jit
    def outer(w):
        return autocast(lambda x: x @ w, jnp.bfloat16)(X)

    assert dtypes_of(jax.make_jaxpr(outer)(W), "dot_general") == [{"bfloat16"}]
    gradient = jax.grad(lambda w: outer(w).sum().astype(np.float32))(W)
    assert_same_bits(gradient, jnp.broadcast_to(X.sum(0)[:, None], W.shape))


@pytest.mark.sampled(1)
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


# --- What the backward pass keeps.


def kept(fn, *args):
    """Return the dtypes and shapes of what the backward pass of a function keeps."""
    return sorted(
        (x.dtype.name, x.shape) for x in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args))
    )


@pytest.mark.parametrize("fn", [kernel(jax.nn.gelu), recomputed(lambda x: jnp.exp(jnp.sin(x)))])
def test_an_elementwise_operation_keeps_its_low_precision_input_alone(fn):
    x, low_x = F32, F32.astype(jnp.bfloat16)
    assert {kind for kind, _ in kept(autocast(lambda x: fn(x @ F32), jnp.bfloat16), x)} == {"bfloat16"}
    assert kept(recomputed(fn), low_x) == [("bfloat16", (4, 4))]
    assert ("float32", (4, 4)) in kept(fn, x)


def test_a_recomputed_kernel_has_the_gradient_of_the_function_rounded_once():
    x = low(jnp.linspace(-3, 3, 16).reshape(4, 4))
    cast = autocast(lambda x: kernel(jax.nn.gelu)(x @ jnp.eye(4)), jnp.bfloat16)
    expected = jax.grad(lambda x: jax.nn.gelu(x).sum())(x)
    assert_same_bits(jax.grad(lambda x: cast(x).astype(np.float32).sum())(x), low(expected))
    with jax.enable_x64(True):
        jax.test_util.check_grads(cast, [np.linspace(-2.0, 2.0, 16).reshape(4, 4)], order=2)


# --- A linear layer's bias.


def low(x):
    return x.astype(jnp.bfloat16).astype(np.float32)


LINEAR = {
    "nnx": lambda x, w, b: nnx_linear(x, w, b),
    "by hand": lambda x, w, b: x @ w + b[None],
    "the bias first": lambda x, w, b: b[None] + x @ w,
    "an example at a time": lambda x, w, b: jax.vmap(lambda row: w.T @ row + b)(x),
    "in a scan": lambda x, w, b: lax.map(lambda row: (row[None] @ w + b[None])[0], x),
}


def nnx_linear(x, w, b):
    layer = nnx.Linear(*w.shape, rngs=nnx.Rngs(0))
    layer.kernel, layer.bias = nnx.Param(w), nnx.Param(b)
    return layer(x)


@pytest.mark.parametrize("layer", LINEAR)
def test_a_linear_layer_is_rounded_once_and_so_is_the_gradient_of_its_bias(layer):
    random = np.random.default_rng(0)
    x, w, b = (random.normal(size=n).astype(np.float32) for n in ((64, 4), (4, 8), (8,)))
    cast = autocast(LINEAR[layer], jnp.bfloat16)
    out = cast(x, w, b)
    assert out.dtype == jnp.bfloat16
    product = jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=np.float32)
    assert_same_bits(out, (product + low(b)[None]).astype(jnp.bfloat16))
    cotangent = np.asarray(low(random.normal(size=(64, 8)).astype(np.float32)))
    gradient = jax.grad(lambda b: (cast(x, w, b).astype(np.float32) * cotangent).sum())(b)
    assert gradient.dtype == np.float32
    rounded = low(jnp.asarray(cotangent.sum(0)))
    if layer == "in a scan":  # each example's gradient is rounded before the sum
        np.testing.assert_allclose(gradient, rounded, rtol=2**-8)
    else:
        assert_same_bits(gradient, rounded)
    # The products of the backward pass are low-precision nevertheless.
    traced = jax.make_jaxpr(jax.grad(lambda x, w: cast(x, w, b).astype(np.float32).sum(), argnums=(0, 1)))(x, w)
    assert operands_of(traced, "dot_general") == [{"bfloat16"}] * 3


@pytest.mark.parametrize(("platform", "product"), [("cuda", "bf16"), ("cpu", "f32")])
def test_a_product_is_lowered_with_its_bias_in_the_form_that_the_platform_rounds_once(platform, product):
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 4), (4, 8), (8,))]
    traced = jax.jit(autocast(nnx_linear, jnp.bfloat16)).trace(*shapes)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    assert [line.rpartition("x")[2] for line in lines if "dot_general" in line] == [f"{product}>"]


NO_BIAS = {
    "a matrix": lambda x, w, b: x @ w + x[:, :1] * b[None],
    "a column": lambda x, w, b: x @ w + x[:, :1],
    "no product": lambda x, w, b: jnp.tanh(x @ w) + b[None],
    "of a batched product": lambda x, w, b: jnp.einsum("bij,bjk->bik", x[None], w[None]) + b[None, None],
}


@pytest.mark.parametrize("formula", NO_BIAS)
def test_other_additions_return_float32(formula):
    out = jax.eval_shape(autocast(NO_BIAS[formula], jnp.bfloat16), jnp.ones((5, 4)), jnp.ones((4, 8)), jnp.ones(8))
    assert out.dtype == np.float32


# --- Regions with other dtypes.


def test_autocast_disabled_regions_stay_in_float32():
    @jt.autocast_disabled()
    def head(x):
        return x @ W

    def fn(x):
        with jt.autocast_disabled():
            inside = lax.scan(lambda c, _: (c @ W, None), x, None, length=2)[0]
        return x @ W, inside, jax.jit(head)(x @ W), x @ W

    dtypes = [out.dtype.name for out in jax.eval_shape(autocast(fn, jnp.bfloat16), X)]
    assert dtypes == ["bfloat16", "float32", "float32", "bfloat16"]
    products = dtypes_of(jax.make_jaxpr(jax.grad(lambda x: autocast(head, jnp.bfloat16)(x).sum()))(X), "dot_general")
    assert products == [{"float32"}] * len(products)
    # Later transformations preserve it.
    cast = rematerialize(autocast(lambda x: jt.block(head)(x).sum(), "float16"), "full")
    assert dtypes_of(jax.make_jaxpr(jax.grad(cast))(X), "dot_general")[0] == {"float32"}


def test_an_inner_autocast_takes_precedence():
    inner = autocast(lambda x: x @ W, "float16")
    outs = jax.eval_shape(autocast(lambda x: (inner(x), x @ W), jnp.bfloat16), X)
    assert [out.dtype.name for out in outs] == ["float16", "bfloat16"]


def test_a_kernel_computes_in_float32_and_rounds_once():
    def cube(x):
        return x * x * x

    x = jnp.linspace(0.1, 3.0, 64).reshape(8, 8)
    ours = autocast(lambda x: kernel(cube)(x @ jnp.eye(8)), jnp.bfloat16)(x)
    assert_same_bits(ours, cube(low(x)).astype(jnp.bfloat16))
    assert not np.array_equal(ours, cube(x.astype(jnp.bfloat16)))
    assert_same_bits(kernel(cube)(x), cube(x))


def test_autocast_accepts_keyword_arguments():
    cast = autocast(lambda x, *, scale, w: scale * (x @ w), jnp.bfloat16)
    assert_same_bits(cast(X, w=W, scale=2.0), autocast(lambda x: 2.0 * (x @ W), jnp.bfloat16)(X))


def test_shardings_requested_inside_are_preserved():
    rows = jax.NamedSharding(MESH, ROWS)
    sharded = jax.jit(lambda x: x @ W, out_shardings=rows)
    out = jax.jit(autocast(sharded, jnp.bfloat16))(jnp.concatenate([X, X]))
    assert out.sharding.is_equivalent_to(rows, 2)


def test_equations_keep_their_source_line_and_name_scope():
    def fn(x):
        with jax.named_scope("attention"):
            return jnp.exp(x @ W)

    traced = jax.make_jaxpr(jaxpr.transform(fn, lambda eqn, args, run: None))(X)
    for eqn in traced.eqns:
        assert jaxpr.in_scope(eqn, "attention")
        assert any(frame.file_name == __file__ for frame in eqn.source_info.traceback.frames)


def test_an_unknown_device_is_refused():
    with pytest.raises(jt.UserError, match="device 'tpu' has no autocast lists: use one of cuda, cpu"):
        autocast(jnp.sin, jnp.bfloat16, device="tpu")


# --- A whole model.

CONFIG = GPT2Config(vocab_size=19, n_positions=8, n_embd=16, n_layer=2, n_head=2, dropout=0.1)
TOKENS = np.random.default_rng(0).integers(0, 19, size=(3, 9)).astype(np.int32)


@functools.cache
def gpt2():
    apply, params = functional(GPT2(CONFIG, rngs=nnx.Rngs(0)))

    def loss(params, tokens, rng):
        return cross_entropy(apply(params, tokens[:, :-1], rng), tokens[:, 1:]).mean()

    return loss, jax.tree.map(lambda p: p * 4, params)


@pytest.mark.sampled(1)
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
@pytest.mark.slow
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


# --- Policies.


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
    products = [e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"]
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


def test_policies_compose():
    head = policy("fp32").apply(lambda x: x @ W)

    def body(x):
        return x @ W, head(x @ W)

    for name in ("bf16", "fp16"):
        outs = jax.eval_shape(policy(name).apply(body), X)
        assert [out.dtype.name for out in outs] == [np.dtype(policy(name).compute_dtype).name, "float32"]
    traced = jax.make_jaxpr(policy("bf16").apply(head))(X)
    (eqn,) = (e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general")
    assert eqn.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def test_a_low_precision_value_is_converted_once_so_that_its_gradient_is_rounded_once():
    def fn(x):
        wide = x @ W
        return (wide - wide.mean(-1, keepdims=True)) * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True))

    traced = jax.make_jaxpr(autocast(fn, jnp.bfloat16))(X)
    conversions = [e for e in equations(traced.jaxpr) if e.primitive.name == "convert_element_type"]
    # One for each operand of the product, and one for the product.
    assert len(conversions) == 3


def test_a_python_number_as_exponent_returns_float32_under_x64():
    with jax.enable_x64(True):
        out = autocast(lambda x, n: (x @ x) ** n, jnp.bfloat16)(F32, 2.5)
        assert out.dtype == np.float32


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
    references = [marked(jt.kernel), marked(lambda fn: precision.low_precision(fn, fn))]
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert len(precision._LOW_OPERATIONS) == known


def test_a_low_precision_operation_is_registered_once():
    def product(x):
        return x @ x

    assert precision.low_precision(product, product) is precision.low_precision(product, product)
