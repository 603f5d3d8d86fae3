"""The policy bf16_compute: bfloat16 throughout, with float32 inside norms, softmaxes, losses and sums of gradients."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Literal

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.models.batch_norm import BatchNorm
from jaxtrain.models.layers.layer_norm import LayerNorm
from jaxtrain.models.llama.llama_model import RMSNorm
from jaxtrain.passes.policies import policy
from jaxtrain.program import equations
from jaxtrain.program.equations import visit

compute = policy("bf16_compute").apply
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), np.float32)
W, B = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), np.float32), jnp.linspace(-1.0, 1.0, 8)
LABELS = jnp.array([1, 0, 7])


def rounded(x):
    return x.astype(jnp.bfloat16).astype(np.float32)


def used_equations(traced):
    """Yield the equations on which the results depend, at any depth."""
    used = {v for v in traced.outvars if not isinstance(v, Literal)}
    for eqn in reversed(traced.eqns):
        if used.intersection(eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, Literal))
            yield eqn
            for inner in equations.inner_jaxprs(eqn):
                yield from used_equations(inner)


def low_equations(fn, *args, names):
    """Return the equations of these primitives that have bfloat16 operands, in the function and its gradient."""
    weights = np.arange(1.0, jax.eval_shape(fn, *args).size + 1, dtype=np.float32)
    grad = jax.grad(lambda *args: (fn(*args).astype(np.float32).ravel() * weights).sum())
    found = [e for f in (fn, grad) for e in used_equations(jax.make_jaxpr(f)(*args).jaxpr)]
    assert {e.primitive.name for e in found} & {*names}, "none of them is in the function"
    return [e for e in found if e.primitive.name in names and any(v.aval.dtype == jnp.bfloat16 for v in e.invars)]


SUMS = ("exp", "log", "rsqrt", "reduce_sum", "scatter-add", "div", "square", "integer_pow", "sub")


def softmax_by_hand(x):
    exps = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return exps / exps.sum(-1, keepdims=True)


NORMS_SOFTMAXES_LOSSES = {
    "LayerNorm": (LayerNorm(8, 1e-5), "bfloat16"),
    "RMSNorm": (lambda x: RMSNorm(8, 1e-5)(x).astype(x.dtype), "bfloat16"),
    "BatchNorm": (lambda x: BatchNorm(8)(x, True), "bfloat16"),
    "flax's LayerNorm": (nnx.LayerNorm(8, rngs=nnx.Rngs(0), use_scale=False, use_bias=False), "bfloat16"),
    "flax's RMSNorm": (nnx.RMSNorm(8, rngs=nnx.Rngs(0), use_scale=False), "bfloat16"),
    "softmax": (jax.nn.softmax, "bfloat16"),
    "masked softmax": (lambda x: jax.nn.softmax(x, where=x < 1), "bfloat16"),
    "softmax by hand": (lambda x: softmax_by_hand(x), "bfloat16"),
    "log_softmax": (jax.nn.log_softmax, "bfloat16"),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), "bfloat16"),
    "softmax in a scan": (lambda x: lax.map(jax.nn.softmax, x), "bfloat16"),
    "softmax in a checkpoint": (jax.checkpoint(lambda x: jax.nn.softmax(x @ x.T)), "bfloat16"),
    "cross_entropy": (lambda x: cross_entropy(x, LABELS), "float32"),
    "sum of cross_entropy": (lambda x: cross_entropy(x, LABELS).sum(), "float32"),
    "mean in a scan": (lambda x: lax.map(lambda x: cross_entropy(x, LABELS[0]), x).mean(), "float32"),
    "loss of Predictions": (lambda x: jt.Predictions(x, LABELS, jnp.arange(3.0)).loss().total, "float32"),
    "masked cross_entropy": (lambda x: jnp.where(LABELS > 0, cross_entropy(x, LABELS), 0.0), "float32"),
}


@pytest.mark.parametrize("name", NORMS_SOFTMAXES_LOSSES)
def test_norms_softmaxes_and_losses_are_float32_inside(name):
    fn, expected = NORMS_SOFTMAXES_LOSSES[name]
    with jax.numpy_dtype_promotion("standard"):  # which flax's layers rely on
        assert low_equations(compute(fn), X, names=SUMS) == []
        out = jax.jit(compute(fn))(X)
        assert out.dtype == expected
        # From the same rounded inputs the results differ by their own rounding alone.
        exact = jax.jit(fn)(rounded(X))
        bound = 2.0**-8 if expected == "bfloat16" else 2.0**-21
        np.testing.assert_array_less(abs(out - exact), bound * (abs(exact) + 2.0**-20) + 1e-30)


CONFIG = GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=2, n_head=2, dropout=0.1)
TOKENS = np.arange(10).reshape(2, 5).astype(np.int32)


def test_activations_and_the_residual_stream_of_a_model_are_bfloat16():
    apply, params = functional(GPT2(CONFIG, rngs=nnx.Rngs(0)))

    def loss_fn(params, tokens, rng):
        return cross_entropy(apply(params, tokens[:, :-1], rng), tokens[:, 1:]).sum()

    traced = jax.make_jaxpr(jax.value_and_grad(compute(loss_fn)))(params, TOKENS, jax.random.key(0))
    assert {v.aval.dtype.name for v in traced.jaxpr.outvars} == {"float32"}
    found = [*visit(traced.jaxpr)]
    products = [e for e in found if e.primitive.name == "dot_general"]
    assert len(products) >= 3 * 7
    assert {v.aval.dtype.name for e in products for v in e.invars} == {"bfloat16"}
    forward, *_ = (e for e in found if e.primitive.name == "scan")
    n_consts, n_carry = equations.scan_sizes(forward)
    assert [v.aval.dtype.name for v in forward.invars[n_consts : n_consts + n_carry]] == ["bfloat16"]
    # Where the stream meets a branch, both are bfloat16.
    shape = (2, 4, 8)
    joins = [e for e in visit(forward.params["jaxpr"].jaxpr) if e.primitive.name == "add"]
    joins = [e for e in joins if {v.aval.shape for v in e.invars} == {shape}]
    assert sum(e.outvars[0].aval.dtype == jnp.bfloat16 for e in joins) >= 2


def test_master_parameters_moments_and_gradients_are_float32():
    def loss_fn(params, batch, rng):
        return jt.Loss.of(batch @ params["w"]), {}

    step = jt.train_step(loss_fn, optax.sgd(2.0**-12, momentum=0.5), precision="bf16_compute", clip_norm=1e6)
    state = step.init({"w": jnp.ones(2)})
    for _ in range(2):
        state, metrics = step(state, jnp.ones((3, 2)))
    assert {x.dtype.name for x in jax.tree.leaves((state.params, state.opt_state))} == {"float32"}
    # Two updates, each smaller than half the distance of 1 to the next number in bfloat16, and momentum.
    np.testing.assert_array_equal(state.params["w"], np.float32([1 - 2.5 * 2.0**-12] * 2))
    assert metrics["grad_norm"].dtype == np.float32


def test_inputs_are_rounded_and_model_state_is_not():
    def loss_fn(params, batch, rng, model_state):
        assert (params.dtype, batch.dtype, model_state.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32)
        return jt.Loss.of(batch[:, None] @ params[None]), {}, model_state + jnp.float32(2.0**-12)

    step = jt.train_step(loss_fn, optax.sgd(0.1), precision="bf16_compute")
    state, metrics = step(step.init(jnp.float32(1 + 2.0**-12), model_state=jnp.float32(1)), jnp.full(3, 1 + 2.0**-12))
    assert float(state.model_state) == 1 + 2.0**-12
    assert float(metrics["loss"]) == 1


SUMMED = {
    "a bias": (lambda x, w, b: jnp.tile(x @ w, (400, 1)) + b[None], 2),
    "an embedding": (lambda x, w, b: w[np.zeros(1200, int)], 1),
    "repeated rows": (lambda x, w, b: jnp.broadcast_to(b, (1200, 8)), 2),
    "a factor": (lambda x, w, b: jnp.tile(jnp.ones_like(x), (400, 1)) * b[None], 2),
}


@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_repeated_values_are_summed_in_float32(name):
    fn, at = SUMMED[name]
    grad = jax.jit(jax.grad(lambda *args: compute(fn)(*args).astype(np.float32).sum(), argnums=at))
    gradient = grad(X, W, B)
    assert gradient.dtype == np.float32
    # 1,200 ones: a sum in bfloat16 stops at 256.
    np.testing.assert_array_equal(gradient.reshape(-1, 8)[0], rounded(jnp.full(8, 1200.0)))
    sums = [e for e in visit(grad.trace(X, W, B).jaxpr.jaxpr) if e.primitive.name in ("reduce_sum", "scatter-add")]
    sums = [e for e in sums if e.invars[0].aval.size != e.outvars[0].aval.size or e.primitive.name != "reduce_sum"]
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}


def test_conversions_to_float32_in_the_code_are_kept():
    def fn(x, w):
        wide = x.astype(np.float32) @ w.astype(np.float32)
        with jt.autocast_disabled():
            return wide, policy("fp32").apply(lambda x: x @ x.T)(x), x @ w

    assert [y.dtype.name for y in compute(fn)(X, W)] == ["float32", "float32", "bfloat16"]


LAYERS, LAYER_PARAMS = nnx.split((nnx.Embed(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
WIDE_LAYER, WIDE_PARAMS = nnx.split(nnx.Linear(8, 8, dtype=np.float32, rngs=nnx.Rngs(0)))


def embed_and_project(params):
    embed, linear = nnx.merge(LAYERS, params)
    h = embed(LABELS)
    return lax.scan(lambda h, _: (linear(linear(h)), None), h, length=2)[0]


def times_constants(x):
    h = x + np.ones((1, 8), np.float32)
    return h @ jnp.ones((8, 8), x.dtype)


@pytest.mark.parametrize(
    ("fn", "args", "count", "offset"),
    [(embed_and_project, (LAYER_PARAMS,), "2 products are", 3), (times_constants, (X,), "a product is", 2)],
)
def test_a_product_that_a_float32_value_promotes_is_a_warning_with_its_line(fn, args, count, offset):
    line = f"test_low_compute.py:{fn.__code__.co_firstlineno + offset}"
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.warns(UserWarning, match=f"^{count} .* first at {line}: ") as found,
    ):
        jax.eval_shape(compute(fn), *args)
    assert len(found) == 1


def test_a_product_that_the_code_asks_for_in_float32_is_no_warning():
    def fn(x, w, params):
        wide = x.astype(np.float32)
        layer = nnx.merge(WIDE_LAYER, params)
        explicit = wide @ w, wide @ w.astype(np.float32), (wide + 1) @ w.astype(np.float32), layer(x), layer(wide)
        return (
            explicit,
            policy("fp32").apply(lambda x: (x + 1) @ w)(x),
            jnp.matmul(x, w, preferred_element_type=np.float32),
        )

    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings(action="error"):
        jax.eval_shape(compute(fn), X, W, WIDE_PARAMS)


def test_a_kernel_and_a_loss_round_once_in_low_precision():
    x = X.astype(jnp.bfloat16)
    assert jt.kernel(jnp.tanh)(x).dtype == jnp.bfloat16
    cube = jt.kernel(lambda x: x * x * x)(x)
    np.testing.assert_array_equal(cube, (rounded(X) ** 3).astype(jnp.bfloat16))
    np.testing.assert_array_equal(cross_entropy(x, LABELS), cross_entropy(rounded(X), LABELS).astype(jnp.bfloat16))
