"""The chunked loss equals the plain one in value and gradient, and stores a fraction of its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain
from jaxtrain import autocast
from jaxtrain.errors import UserError
from jaxtrain.losses import chunked_cross_entropy, cross_entropy, label_weights
from jaxtrain.program import equations

WIDTH, VOCABULARY = 5, 11


def draw(*shape, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random(shape) < 0.3, -100, rng.integers(VOCABULARY, size=shape))
    return rng.standard_normal((*shape, WIDTH)), rng.standard_normal((WIDTH, VOCABULARY)), labels


def value_and_gradients(fn, hidden, projection, labels):
    cotangent = np.random.default_rng(1).standard_normal(labels.shape).astype(hidden.dtype)
    values, pull = jax.vjp(lambda h, w: fn(h, w, labels), hidden, projection)
    return [values, *pull(cotangent)]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"ignore_index": 3}])
@pytest.mark.parametrize(("shape", "chunk"), [((12,), 4), ((2, 5), 4), ((3, 2, 2), 1), ((7,), 100)])
def test_values_and_gradients_equal_cross_entropy_in_float64(shape, chunk, options):
    hidden, projection, labels = draw(*shape)
    with jax.enable_x64(True):
        ours = jax.jit(
            lambda h, w, y: value_and_gradients(lambda *a: chunked_cross_entropy(*a, chunk=chunk, **options), h, w, y)
        )(hidden, projection, np.where(labels < 0, options.get("ignore_index", -100), labels))
        plain = jax.jit(
            lambda h, w, y: value_and_gradients(lambda h, w, y: cross_entropy(h @ w, y, **options), h, w, y)
        )(hidden, projection, np.where(labels < 0, options.get("ignore_index", -100), labels))
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == np.float64
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_an_invalid_label_gives_nan_and_no_tokens_give_no_losses():
    hidden, projection, labels = (jnp.asarray(x) for x in draw(6))
    losses = chunked_cross_entropy(hidden, projection, labels.at[4].set(VOCABULARY), chunk=4)
    assert np.isnan(losses).tolist() == [False] * 4 + [True, False]
    assert chunked_cross_entropy(hidden[:0], projection, labels[:0]).shape == (0,)


def test_second_derivatives_equal_cross_entropy():
    hidden, projection, labels = draw(6)

    def curvature(fn):
        def along(t):
            return fn(hidden * t, projection, labels).sum()

        return jax.jit(jax.grad(jax.grad(along)))(1.0)

    with jax.enable_x64(True):
        chunked = curvature(lambda *a: chunked_cross_entropy(*a, chunk=4))
        np.testing.assert_allclose(chunked, curvature(lambda h, w, y: cross_entropy(h @ w, y)), rtol=1e-12)


@pytest.mark.parametrize("precision", [None, jnp.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_at_a_vocabulary_of_32768_temporaries_are_under_a_quarter(precision, tied):
    tokens, width, vocabulary, chunk = 2048, 64, 32_768, 256

    def temporaries(loss):
        def total(hidden, projection, labels):
            return loss(hidden, projection.T if tied else projection, labels).sum()

        fn = total if precision is None else autocast(total, precision)
        like = jax.ShapeDtypeStruct
        projection = like((vocabulary, width) if tied else (width, vocabulary), np.float32)
        inputs = like((tokens, width), np.float32), projection, like((tokens,), np.int32)
        compiled = jax.jit(jax.value_and_grad(fn, argnums=(0, 1))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain = temporaries(lambda h, w, y: cross_entropy(h @ w, y))
    chunked = temporaries(lambda h, w, y: chunked_cross_entropy(h, w, y, chunk=chunk))
    print(f"temporaries: plain {plain / 1e6:.0f} MB, chunked {chunked / 1e6:.0f} MB")
    # The plain loss must hold at least all logits for the comparison to be meaningful.
    assert plain >= tokens * vocabulary * 4
    assert chunked <= plain / 4


def products(traced):
    for eqn in traced.eqns:
        if eqn.primitive.name == "dot_general":
            yield {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)}
        for inner in equations.inner_jaxprs(eqn):
            yield from products(inner)


def test_under_autocast_products_are_bfloat16_and_the_weight_gradient_is_summed_in_float32():
    hidden, projection, labels = (jnp.asarray(x) for x in draw(6))

    def total(hidden, projection):
        return chunked_cross_entropy(hidden, projection, labels, chunk=2).sum()

    traced = jax.make_jaxpr(jax.grad(autocast(total, jnp.bfloat16), argnums=(0, 1)))(hidden, projection)
    # The forward product, its recomputation in the backward pass, and the two gradients.
    assert list(products(traced.jaxpr)) == [{"bfloat16"}] * 4
    carries = [
        v.aval
        for eqn in traced.jaxpr.eqns
        if eqn.primitive.name == "scan"
        for v in eqn.outvars[: equations.scan_sizes(eqn)[1]]
    ]
    assert (projection.shape, np.float32) in [(aval.shape, aval.dtype) for aval in carries]


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_training_with_accumulation_equals_training_with_cross_entropy(remat):
    hidden, projection, labels = draw(8)

    def trained(loss):
        def loss_fn(params, batch, rng):
            total = loss(jnp.tanh(batch["x"] @ params["body"]), params["head"], batch["y"]).sum()
            return jaxtrain.Loss(total, label_weights(batch["y"]).sum()), {}

        step = jaxtrain.train_step(loss_fn, optax.sgd(0.5), accumulate=2, precision="fp64", remat=remat)
        state = step.init({"body": np.eye(WIDTH), "head": projection})
        for _ in range(3):
            state, metrics = step(state, {"x": hidden, "y": labels})
        return state.params, metrics["loss"]

    with jax.enable_x64(True):
        ours = trained(lambda *a: chunked_cross_entropy(*a, chunk=2))
        plain = trained(lambda h, w, y: cross_entropy(h @ w, y))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), ours, plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"labels": jnp.zeros((7,), int)}, r"be \[6\] for hidden \[6, 5\], got \[7\]"),
    ],
)
def test_invalid_arguments_raise_one_line(change, message):
    hidden, projection, labels = (jnp.asarray(x) for x in draw(6))
    given = {"hidden": hidden, "projection": projection, "labels": labels, **change}
    with pytest.raises(UserError, match=message):
        chunked_cross_entropy(**given)
