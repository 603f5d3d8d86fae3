"""Every loss equals PyTorch's in value and gradient, at its kinks too; invalid arguments."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.models.clip.modeling_clip import image_text_contrastive_loss

from jaxtrain import autocast, losses
from jaxtrain.errors import UserError
from jaxtrain.losses.normalizer import one_pass

SHAPES = [(1,), (6,), (2, 3)]
CLASSES, FEATURES = 4, 3


def on_a_grid(rng, *shape):
    """Small multiples of ½, many of them equal, so that every kink occurs."""
    return rng.integers(-4, 5, shape) / 2


_at_bound = torch.zeros((), requires_grad=True)
torch.clamp(_at_bound, 0).backward()


def margins(draw):
    """Return draws for losses with a margin: no ties with PyTorch 2.14, whose `clamp` has another gradient there."""
    if _at_bound.grad != 0:
        return draw
    return lambda rng, *shape: (x := draw(rng, *shape)) + rng.uniform(0.01, 0.02, x.shape)


def scores(rng, *shape):
    return rng.standard_normal((*shape, CLASSES)) * 3


def log_probs(rng, *shape):
    return np.asarray(torch.from_numpy(scores(rng, *shape)).log_softmax(-1))


def labels(rng, *shape):
    """Return labels, about one in four of them ignored."""
    return np.where(rng.random(shape) < 0.25, -100, rng.integers(CLASSES, size=shape))


def signs(rng, *shape):
    return rng.choice([-1, 1], shape)


def embeddings(rng, *shape):
    return on_a_grid(rng, *shape, FEATURES)


def class_weight(rng, *shape):
    return rng.choice([0.0, 0.5, 1.0, 3.0], CLASSES)


def numbers_of_tokens(rng, *shape):
    return rng.integers(0, 9, (*shape, CLASSES))


def constant(x):
    """Return the value of `x`, with a gradient of 0 instead of none."""
    return x.detach() + 0 * x


def dpo(chosen, rejected, reference_chosen, reference_rejected, *, beta=0.1, label_smoothing=0.0):
    """Formula of `trl.DPOTrainer`, "sigmoid" and, with smoothing, "aot_unpaired" of sorted pairs."""
    delta = (chosen - constant(reference_chosen)) - (rejected - constant(reference_rejected))
    return -F.logsigmoid(beta * delta) * (1 - label_smoothing) - F.logsigmoid(-beta * delta) * label_smoothing


def ipo(chosen, rejected, reference_chosen, reference_rejected, chosen_tokens, rejected_tokens):
    """Formula of `trl.DPOTrainer`, "ipo"."""
    chosen_average = (chosen - constant(reference_chosen)) / chosen_tokens.clamp(min=1.0)
    rejected_average = (rejected - constant(reference_rejected)) / rejected_tokens.clamp(min=1.0)
    return (chosen_average - rejected_average - 1 / (2 * 0.1)) ** 2


def bradley_terry(chosen, rejected, margin):
    """Formula of `trl.RewardTrainer`, with `center_rewards_coefficient` 0.1."""
    return -F.logsigmoid(chosen - rejected - margin) + 0.1 * (chosen + rejected) ** 2


def classes_second(fn):
    """PyTorch's classes are on the second axis; ours on the last."""

    def compute(x, y, *rest):
        return fn(x.movedim(-1, 1) if x.ndim > 1 else x, y, *rest)

    return compute


class Loss(NamedTuple):
    ours: Callable
    theirs: Callable
    draw: tuple[Callable, ...]


def none(fn, **options):
    return lambda *inputs: fn(*inputs, **options, reduction="none")


def weighted(fn, **options):
    return classes_second(lambda x, y, w: fn(x, y, weight=w, **options, reduction="none"))


LOSSES = {
    "cross_entropy": Loss(losses.cross_entropy, classes_second(none(F.cross_entropy)), (scores, labels)),
    "cross_entropy ignoring a class": Loss(
        lambda x, y: losses.cross_entropy(x, y, ignore_index=2),
        classes_second(none(F.cross_entropy, ignore_index=2)),
        (scores, lambda rng, *shape: rng.integers(CLASSES, size=shape)),
    ),
    "cross_entropy smoothed": Loss(
        lambda x, y: losses.cross_entropy(x, y, label_smoothing=0.3),
        classes_second(none(F.cross_entropy, label_smoothing=0.3)),
        (scores, labels),
    ),
    "cross_entropy weighted": Loss(
        lambda x, y, w: losses.cross_entropy(x, y, class_weight=w),
        weighted(F.cross_entropy),
        (scores, labels, class_weight),
    ),
    "cross_entropy smoothed and weighted": Loss(
        lambda x, y, w: losses.cross_entropy(x, y, label_smoothing=0.3, class_weight=w),
        weighted(F.cross_entropy, label_smoothing=0.3),
        (scores, labels, class_weight),
    ),
    "nll": Loss(losses.nll, classes_second(none(F.nll_loss)), (log_probs, labels)),
    "nll weighted": Loss(
        lambda x, y, w: losses.nll(x, y, class_weight=w), weighted(F.nll_loss), (log_probs, labels, class_weight)
    ),
    "dpo": Loss(lambda *x: losses.dpo(*x, beta=0.3), lambda *x: dpo(*x, beta=0.3), (scores,) * 4),
    "dpo smoothed": Loss(
        lambda *x: losses.dpo(*x, label_smoothing=0.2), lambda *x: dpo(*x, label_smoothing=0.2), (scores,) * 4
    ),
    "ipo": Loss(losses.ipo, ipo, (scores,) * 4 + (numbers_of_tokens,) * 2),
    "bradley_terry": Loss(
        lambda c, r, m: losses.bradley_terry(c, r, margin=m, center=0.1), bradley_terry, (scores, scores, scores)
    ),
    "mse": Loss(losses.mse, none(F.mse_loss), (on_a_grid, on_a_grid)),
    "l1": Loss(losses.l1, none(F.l1_loss), (on_a_grid, on_a_grid)),
    **{
        f"smooth_l1 {beta}": Loss(
            lambda p, t, beta=beta: losses.smooth_l1(p, t, beta=beta),
            none(F.smooth_l1_loss, beta=beta),
            (on_a_grid, on_a_grid),
        )
        for beta in (0.0, 0.5, 1.0)
    },
    **{
        f"huber {delta}": Loss(
            lambda p, t, delta=delta: losses.huber(p, t, delta=delta),
            none(F.huber_loss, delta=delta),
            (on_a_grid, on_a_grid),
        )
        for delta in (0.5, 2.0)
    },
    "binary_cross_entropy_with_logits": Loss(
        losses.binary_cross_entropy_with_logits,
        none(F.binary_cross_entropy_with_logits),
        (scores, lambda rng, *shape: rng.random((*shape, CLASSES))),
    ),
    "binary_cross_entropy_with_logits weighted": Loss(
        lambda x, t, w: losses.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w, reduction="none"),
        (scores, lambda rng, *shape: rng.random((*shape, CLASSES)), class_weight),
    ),
    "kl_div": Loss(losses.kl_div, none(F.kl_div), (log_probs, lambda rng, *shape: np.exp(log_probs(rng, *shape)))),
    "kl_div of logs": Loss(
        lambda x, t: losses.kl_div(x, t, log_target=True), none(F.kl_div, log_target=True), (log_probs, log_probs)
    ),
    **{
        f"cosine_embedding {margin}": Loss(
            lambda a, b, y, margin=margin: losses.cosine_embedding(a, b, y, margin=margin),
            lambda a, b, y, margin=margin: F.cosine_embedding_loss(
                a.flatten(0, -2), b.flatten(0, -2), y.flatten(), margin, reduction="none"
            ).reshape(y.shape),
            (margins(embeddings), margins(embeddings), signs),
        )
        for margin in (0.0, 0.5)
    },
    **{
        f"triplet_margin {options}": Loss(
            lambda a, b, c, options=options: losses.triplet_margin(a, b, c, **options),
            none(F.triplet_margin_loss, **options),
            (margins(embeddings), margins(embeddings), margins(embeddings)),
        )
        for options in ({}, {"margin": 0.5, "swap": True}, {"p": 1.0}, {"p": 3.0})
    },
    "hinge_embedding": Loss(losses.hinge_embedding, none(F.hinge_embedding_loss), (margins(on_a_grid), signs)),
    "hinge_embedding 0.5": Loss(
        lambda x, y: losses.hinge_embedding(x, y, margin=0.5),
        none(F.hinge_embedding_loss, margin=0.5),
        (margins(on_a_grid), signs),
    ),
}


def ours_and_theirs(loss, inputs):
    """Return pairs (ours, PyTorch's): the values, and the gradient of each differentiated input."""
    wanted = [i for i, draw in enumerate(loss.draw) if draw not in (labels, signs, class_weight)]
    wanted = [i for i in wanted if inputs[i].dtype == np.float64]
    tensors = [torch.tensor(x, requires_grad=i in wanted) for i, x in enumerate(inputs)]
    expected = loss.theirs(*tensors)
    cotangent = np.random.default_rng(0).standard_normal(tuple(expected.shape))
    (expected * torch.from_numpy(cotangent)).sum().backward()

    def value_and_gradients(cotangent, *inputs):
        def of_wanted(*xs):
            given = dict(zip(wanted, xs, strict=True))
            return loss.ours(*(given.get(i, x) for i, x in enumerate(inputs)))

        values, pull = jax.vjp(of_wanted, *(inputs[i] for i in wanted))
        return [values, *pull(cotangent)]

    with jax.enable_x64(True):
        ours = compiled(loss, value_and_gradients)(cotangent, *inputs)
    return zip(ours, [expected.detach(), *(tensors[i].grad for i in wanted)], strict=True)


COMPILED = {}


def compiled(loss, fn):
    return COMPILED.setdefault(id(loss), jax.jit(fn))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1))
def test_values_and_gradients_equal_pytorch(name, shape, seed):
    rng, loss = np.random.default_rng(seed), LOSSES[name]
    for ours, theirs in ours_and_theirs(loss, [draw(rng, *shape) for draw in loss.draw]):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), smoothing=st.sampled_from([0.0, 0.1]), weigh=st.booleans())
def test_the_sum_divided_by_the_weights_equals_pytorchs_mean(seed, smoothing, weigh):
    rng = np.random.default_rng(seed)
    logits, y = scores(rng, 8), np.append(labels(rng, 7), 1)
    weight = class_weight(rng) + 0.25 if weigh else None
    with jax.enable_x64(True):
        total = losses.cross_entropy(logits, y, label_smoothing=smoothing, class_weight=weight).sum()
        mean = total / losses.label_weights(jnp.asarray(y), class_weight=weight).sum()
    expected = F.cross_entropy(
        torch.tensor(logits),
        torch.tensor(y),
        weight=None if weight is None else torch.tensor(weight),
        label_smoothing=smoothing,
    )
    np.testing.assert_allclose(mean, expected, rtol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_common_offset_of_the_logits_does_not_reduce_precision(smoothing):
    rng = np.random.default_rng(0)
    logits, y = (scores(rng, 50) + 1000).astype(np.float32), rng.integers(CLASSES, size=50)
    theirs, truth = (
        F.cross_entropy(torch.tensor(x), torch.tensor(y), label_smoothing=smoothing, reduction="none").numpy()
        for x in (logits, logits.astype(np.float64))
    )
    ours = losses.cross_entropy(logits, y, label_smoothing=smoothing)
    assert np.linalg.norm(ours - truth) <= 2 * np.linalg.norm(theirs - truth)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="PyTorch 2.14's clamp has the slope 0 at its bounds")
def test_the_cosine_loss_has_pytorchs_gradient_at_the_margin():
    a, b = np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]])
    loss = Loss(losses.cosine_embedding, none(F.cosine_embedding_loss), (embeddings, embeddings, signs))
    for ours, theirs in ours_and_theirs(loss, [a, b, np.array([-1])]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)


def test_clip_equals_transformers():
    rng = np.random.default_rng(0)
    similarities = rng.standard_normal((5, 5)) * 4
    theirs = torch.tensor(similarities, requires_grad=True)
    expected = image_text_contrastive_loss(theirs)
    expected.backward()
    with jax.enable_x64(True):
        value, gradient = jax.jit(jax.value_and_grad(lambda s: losses.clip(s).sum() / len(s)))(similarities)
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-14)
    np.testing.assert_allclose(gradient, theirs.grad, rtol=1e-12, atol=1e-15)


def test_info_nce_accepts_additional_negatives():
    similarities = np.random.default_rng(0).standard_normal((3, 5))
    with jax.enable_x64(True):
        ours = losses.info_nce(jnp.asarray(similarities))
    np.testing.assert_allclose(ours, F.cross_entropy(torch.tensor(similarities), torch.arange(3), reduction="none"))


@pytest.mark.parametrize("label", [-1, CLASSES, 10**6, -99, -101])
@pytest.mark.parametrize(
    "fn",
    [
        losses.cross_entropy,
        losses.nll,
        lambda x, y: losses.cross_entropy(x, y, label_smoothing=0.1, class_weight=np.ones(CLASSES, np.float32)),
    ],
)
def test_an_invalid_label_makes_only_its_own_loss_and_gradient_nan(fn, label):
    x = jnp.asarray(scores(np.random.default_rng(0), 3), np.float32)
    y = jnp.array([1, label, -100])
    values, pull = jax.vjp(jax.jit(lambda x: fn(x, y)), x)
    (gradient,) = pull(jnp.ones(3))
    assert np.isnan(values).tolist() == [False, True, False]
    assert np.isnan(gradient[1]).any()
    assert np.isfinite(gradient[jnp.array([0, 2])]).all()
    assert values[2] == 0
    np.testing.assert_array_equal(gradient[2], 0)


@pytest.mark.parametrize("fn", [losses.cross_entropy, losses.nll])
def test_the_gradient_of_a_label_has_no_scatter_and_both_modes_of_all_orders(fn):
    """A scatter into zeros is as large as the logits, and no compiler fuses it with the softmax."""
    rng = np.random.default_rng(0)
    y = labels(rng, 6)
    with jax.enable_x64(True):
        x = jnp.asarray(scores(rng, 6))
        gradient = jax.grad(lambda x: (fn(x, y) ** 2).sum())
        assert "scatter" not in str(jax.make_jaxpr(gradient)(x))
        jax.test_util.check_grads(lambda x: fn(x, y) ** 2, [x], order=2)


def test_a_class_of_probability_zero_does_not_affect_an_ignored_label():
    x = jnp.array([[-jnp.inf, 0.0], [0.0, 1.0]])
    gradient = jax.grad(lambda x: losses.cross_entropy(x, jnp.array([-100, 1])).sum())(x)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_under_autocast_a_loss_is_float32_and_its_inputs_are_widened_once(name):
    loss, rng = LOSSES[name], np.random.default_rng(0)
    x, *rest = (draw(rng, 6) for draw in loss.draw)
    x, *rest = (jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else np.int32) for x in (x, *rest))
    x = x.astype(jnp.bfloat16).astype(np.float32)

    def of_a_product(x):
        return loss.ours((x.reshape(6, -1) @ jnp.eye(x.size // 6)).reshape(x.shape), *rest)

    @jax.jit
    def values_and_gradients(x):
        values, pull = jax.vjp(autocast(of_a_product, jnp.bfloat16), x)
        expected, pull_expected = jax.vjp(lambda x: loss.ours(x, *rest), x)
        cotangent = jnp.arange(values.size, dtype=np.float32).reshape(values.shape)
        return (values, expected), (*pull(cotangent), *pull_expected(cotangent))

    (values, expected), (gradient, expected_gradient) = values_and_gradients(x)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)
    # Rounded once: it is not a sum of rounded parts.
    np.testing.assert_array_equal(gradient, expected_gradient.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros((3,), int)),
            r"float32\[2, 3\] must be integers \[2\], classes last, got int32\[3\]",
        ),
        (
            lambda: losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2)),
            r"integers \[2\], .* got float32\[2\]",
        ),
        (
            lambda: losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, int), label_smoothing=1.5),
            r"label_smoothing must be in \[0, 1\], got 1\.5",
        ),
        (
            lambda: losses.nll(jnp.zeros((2, 3)), jnp.zeros(2, int), class_weight=np.ones(2)),
            r"must have shape \[3\], got \[2\]",
        ),
        *(
            (lambda loss=loss: loss(jnp.zeros((2, 1)), jnp.zeros(2)), r" \[2, 1\], targets \[2\]")
            for loss in (
                losses.mse,
                losses.l1,
                losses.huber,
                losses.kl_div,
                losses.hinge_embedding,
                losses.binary_cross_entropy_with_logits,
            )
        ),
        (lambda: losses.smooth_l1(jnp.zeros(2), jnp.zeros(2), beta=-1.0), r"beta must be at least 0, got -1\.0"),
        (lambda: losses.dpo(*[jnp.zeros(2)] * 4, beta=0.0), r"beta must be positive, got 0\.0"),
        (lambda: losses.ipo(*[jnp.zeros(2)] * 6, beta=0.0), r"beta must be positive, got 0\.0"),
        (lambda: losses.huber(jnp.zeros(2), jnp.zeros(2), delta=0.0), r"delta must be positive, got 0\.0"),
        (lambda: losses.cosine_embedding(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 1))), r"targets \[2, 1\]"),
        (lambda: losses.clip(jnp.zeros((2, 3))), r"similarities must be \[N, N\], one text per image, got \[2, 3\]"),
    ],
)
def test_invalid_arguments_raise_one_line(call, message):
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.parametrize("unusual", [0.0, -np.inf, np.inf, np.nan])
def test_the_normalizer_of_one_pass_equals_pytorchs(unusual):
    scores = np.random.default_rng(0).standard_normal((3, 1031)) * 50 + 1e3
    scores[0, 7], scores[1] = unusual, -np.inf
    with jax.enable_x64(True):
        largest, total = one_pass(jnp.asarray(scores))
    # PyTorch's log_softmax is NaN where the largest score is infinite; its logsumexp is not.
    expected = torch.from_numpy(scores).log_softmax(-1)[:, 0].neg().numpy() + scores[:, 0]
    np.testing.assert_allclose(np.asarray(largest) + np.log(total), expected, rtol=1e-14)
