"""Values and gradients equal PyTorch's, exactly at the kinks and to rounding elsewhere; and JAX's own gradients."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import jaxtrain
from jaxtrain.losses import subgradients as sub

INF = float("inf")


class Kink(NamedTuple):
    ours: Callable
    theirs: Callable
    jax_fn: Callable
    at: tuple
    jax_gradients: tuple
    """JAX's own gradients, one per input; a test fails if JAX changes them."""


def naive_cosine(a, b):
    return (a * b).sum(1) / (jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1))


NAN = np.nan
THIRD = 1 / 3
KINKS = {
    "abs": Kink(sub.abs, torch.abs, jnp.abs, ([-1, -0.0, 0, 2],), ([-1, 1, 1, 1],)),
    "clamp": Kink(
        lambda x: sub.clamp(x, -1, 1),
        lambda x: torch.clamp(x, -1, 1),
        lambda x: jnp.clip(x, -1, 1),
        ([-2, -1, 0, 1, 2],),
        ([0, 0.5, 1, 0.5, 0],),
    ),
    "clamp below": Kink(
        lambda x: sub.clamp(x, 0),
        lambda x: torch.clamp(x, 0),
        lambda x: jnp.clip(x, 0),
        ([-1, 0, 1],),
        ([0, 0.5, 1],),
    ),
    "clamp above": Kink(
        lambda x: sub.clamp(x, max=0),
        lambda x: torch.clamp(x, max=0),
        lambda x: jnp.clip(x, max=0),
        ([-1, 0, 1],),
        ([1, 0.5, 0],),
    ),
    "clamp between arrays": Kink(
        sub.clamp,
        torch.clamp,
        jnp.clip,
        ([-2, -1, 0, 1, 2, 1, 3, 0, 2], [-1, -1, -1, -1, -1, 1, 4, 1, 1], [1, 1, 1, 1, 1, 1, 2, 1, 1]),
        (
            [0, 0.5, 1, 0.5, 0, 0.25, 0, 0, 0],
            [1, 0.5, 0, 0, 0, 0.25, 0, 0.5, 0],
            [0, 0, 0, 0.5, 1, 0.5, 1, 0.5, 1],
        ),
    ),
    "hardtanh": Kink(sub.hardtanh, F.hardtanh, jax.nn.hard_tanh, ([-2, -1, 0, 1, 2],), ([0, 1, 1, 1, 0],)),
    "leaky_relu": Kink(sub.leaky_relu, F.leaky_relu, jax.nn.leaky_relu, ([-2, -0.0, 0, 1],), ([0.01, 1, 1, 1],)),
    "prelu": Kink(
        sub.leaky_relu,
        F.prelu,
        lambda x, a: jnp.where(x >= 0, x, a * x),
        ([-2, 0, 1], [0.25]),
        ([0.25, 1, 1], [-2]),
    ),
    "max": Kink(
        lambda x: sub.max(x, 0),
        lambda x: torch.max(x, 0).values,
        lambda x: jnp.max(x, 0),
        ([3, 1, 3, 3],),
        ([THIRD, 0, THIRD, THIRD],),
    ),
    "min": Kink(
        lambda x: sub.min(x, 0),
        lambda x: torch.min(x, 0).values,
        lambda x: jnp.min(x, 0),
        ([3, 1, 1],),
        ([0, 0.5, 0.5],),
    ),
    "median": Kink(sub.median, torch.median, jnp.median, ([3, 1, 4, 2],), ([0.5, 0, 0, 0.5],)),
    "median of equals": Kink(sub.median, torch.median, jnp.median, ([2, 1, 2, 2],), ([0.5, 0, 0.5, 0],)),
    "median along an axis": Kink(
        lambda x: sub.median(x, 0),
        lambda x: torch.median(x, 0).values,
        lambda x: jnp.median(x, 0),
        ([2, 1, 2, 2],),
        ([0.5, 0, 0.5, 0],),
    ),
    "norm": Kink(sub.norm, torch.linalg.vector_norm, jnp.linalg.norm, ([0, 0],), ([NAN, NAN],)),
    "norm 1": Kink(
        lambda x: sub.norm(x, 1),
        lambda x: torch.linalg.vector_norm(x, 1),
        lambda x: jnp.linalg.norm(x, 1),
        ([0, -2],),
        ([1, -1],),
    ),
    "norm 3": Kink(
        lambda x: sub.norm(x, 3),
        lambda x: torch.linalg.vector_norm(x, 3),
        lambda x: jnp.linalg.norm(x, 3),
        ([0, 0],),
        ([NAN, NAN],),
    ),
    "norm ½": Kink(
        lambda x: sub.norm(x, 0.5),
        lambda x: torch.linalg.vector_norm(x, 0.5),
        lambda x: jnp.linalg.norm(x, 0.5),
        ([0, -4],),
        ([INF, -1],),
    ),
    "norm ∞": Kink(
        lambda x: sub.norm(x, INF),
        lambda x: torch.linalg.vector_norm(x, INF),
        lambda x: jnp.linalg.norm(x, INF),
        ([0, 0],),
        ([0.25, 0.25],),
    ),
    "std": Kink(sub.std, torch.std, lambda x: jnp.std(x, ddof=1), ([2, 2, 2],), ([NAN] * 3,)),
    "cosine_similarity": Kink(
        sub.cosine_similarity, F.cosine_similarity, naive_cosine, ([[0, 0]], [[1, 2]]), ([[NAN, NAN]], [[NAN, NAN]])
    ),
    "atan2": Kink(
        sub.atan2,
        torch.atan2,
        jnp.arctan2,
        ([0, -0.0, 0, -0.0, 0], [0, 0, -0.0, -0.0, -1]),
        ([NAN, NAN, NAN, NAN, -1], [NAN, NAN, NAN, NAN, 0]),
    ),
    "pow": Kink(sub.pow, torch.pow, jnp.power, ([0, 0, 2], [0, 2, 3]), ([NAN, 0, 12], [0, 0, 8 * np.log(2)])),
    "pow 0": Kink(lambda x: sub.pow(x, 0.0), lambda x: x**0.0, lambda x: jnp.power(x, 0.0), ([0, 1],), ([NAN, 0],)),
}
_at_bound = torch.zeros((), requires_grad=True)
torch.clamp(_at_bound, 0).backward()
OTHER_CLAMP = pytest.mark.skipif(_at_bound.grad == 0, reason="PyTorch 2.14: tests/torch_import/test_ties.py")
OF_PYTORCH = [
    pytest.param(kink, id=name, marks=[OTHER_CLAMP] if name.startswith("clamp") else []) for name, kink in KINKS.items()
]
SMOOTH = {
    **{name: (kink.ours, kink.theirs, [np.shape(x) for x in kink.at]) for name, kink in KINKS.items()},
    "max of rows": (lambda x: sub.max(x, -1), lambda x: torch.max(x, -1).values, [(3, 5)]),
    "min of columns": (lambda x: sub.min(x, 0), lambda x: torch.min(x, 0).values, [(3, 5)]),
    "median of rows": (lambda x: sub.median(x, 1), lambda x: torch.median(x, 1).values, [(3, 6)]),
    "median of columns": (lambda x: sub.median(x, 0), lambda x: torch.median(x, 0).values, [(3, 6)]),
    "median of a matrix": (sub.median, torch.median, [(3, 6)]),
    "norm of rows": (lambda x: sub.norm(x, axis=1), lambda x: torch.linalg.vector_norm(x, dim=1), [(3, 5)]),
    "norm 3 of columns": (lambda x: sub.norm(x, 3, 0), lambda x: torch.linalg.vector_norm(x, 3, 0), [(3, 5)]),
    "std of rows": (lambda x: sub.std(x, 1), lambda x: torch.std(x, 1), [(3, 5)]),
    "std of columns, biased": (lambda x: sub.std(x, 0, 0), lambda x: torch.std(x, 0, correction=0), [(3, 5)]),
    "cosine of columns": (
        lambda a, b: sub.cosine_similarity(a, b, 0),
        lambda a, b: F.cosine_similarity(a, b, 0),
        [(3, 5), (3, 5)],
    ),
    "cosine of short vectors": (
        lambda a, b: sub.cosine_similarity(1e-9 * a, b),
        lambda a, b: F.cosine_similarity(1e-9 * a, b),
        [(3, 5), (3, 5)],
    ),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def in_torch(fn, points):
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in points]
    value = fn(*inputs)
    return value.detach().numpy(), [g.numpy() for g in torch.autograd.grad(value.sum(), inputs)]


def in_jax(fn, points):
    inputs = [jnp.asarray(x, np.float64) for x in points]

    @jax.jit
    def value_and_gradients(*inputs):
        grads = jax.grad(lambda *xs: fn(*xs).sum(), tuple(range(len(inputs))))(*inputs)
        return fn(*inputs), grads

    value, grads = value_and_gradients(*inputs)
    return np.asarray(value), [np.asarray(g) for g in grads]


@pytest.mark.parametrize("kink", OF_PYTORCH)
def test_values_and_gradients_at_a_kink_equal_pytorch(kink):
    value, grads = in_torch(kink.theirs, kink.at)
    our_value, our_grads = in_jax(kink.ours, kink.at)
    np.testing.assert_array_equal(our_value, value)
    for ours, theirs in zip(our_grads, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-15, atol=0)
    assert not all(np.array_equal(t, j) for t, j in zip(grads, kink.jax_gradients, strict=True)), "no difference"


@pytest.mark.parametrize("kink", KINKS.values(), ids=KINKS)
def test_the_gradient_of_the_jax_function_at_a_kink_is_the_recorded_one(kink):
    _, grads = in_jax(kink.jax_fn, kink.at)
    for found, known in zip(grads, kink.jax_gradients, strict=True):
        np.testing.assert_allclose(found, np.array(known, float), rtol=1e-15, atol=0)


@pytest.mark.parametrize("case", SMOOTH)
@pytest.mark.parametrize("seed", range(2))
def test_values_and_gradients_away_from_kinks_equal_pytorch_to_rounding(case, seed):
    ours, theirs, shapes = SMOOTH[case]
    rng = np.random.default_rng(seed)
    points = [np.abs(p) if case == "pow" else p for p in (2 * rng.standard_normal(shape) for shape in shapes)]
    value, grads = in_torch(theirs, points)
    our_value, our_grads = in_jax(ours, points)
    for a, b in zip([our_value, *our_grads], [value, *grads], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())


@pytest.mark.parametrize("case", ["max", "min", "median of equals", "median along an axis"])
def test_the_same_one_of_equal_values_is_selected_as_in_pytorch(case):
    rng = np.random.default_rng(0)
    for n in range(2, 12):
        points = [rng.integers(0, 3, n)]
        np.testing.assert_array_equal(
            in_jax(KINKS[case].ours, points)[1], in_torch(KINKS[case].theirs, points)[1], err_msg=str(points)
        )


@pytest.mark.parametrize("case", ["abs", "clamp", "hardtanh", "leaky_relu", "max", "median", "median along an axis"])
def test_nan_is_propagated(case):
    assert np.isnan(in_jax(KINKS[case].ours, ([1.0, NAN, 2.0],))[0]).any()
    assert np.isnan(in_torch(KINKS[case].theirs, ([1.0, NAN, 2.0],))[0]).any()


@pytest.mark.parametrize("kink", KINKS.values(), ids=KINKS)
def test_functions_support_second_derivatives_vmap_and_jit(kink):
    inputs = [jnp.asarray(x, np.float64) for x in kink.at]

    def gradient(*xs):
        return jax.grad(lambda *xs: kink.ours(*xs).sum(), tuple(range(len(xs))))(*xs)

    hessian = jax.jacfwd(gradient, tuple(range(len(inputs))))(*inputs)
    assert all(np.isfinite(h).all() for h in jax.tree.leaves(hessian))
    batched = jax.jit(jax.vmap(gradient))(*(jnp.stack([x, x]) for x in inputs))
    for pair, alone in zip(batched, gradient(*inputs), strict=True):
        np.testing.assert_allclose(pair, np.stack([alone, alone]), rtol=1e-15)


@pytest.mark.parametrize("kink", OF_PYTORCH)
def test_gradients_under_autocast_equal_pytorch(kink):
    def gradient(*xs):
        return jax.grad(lambda *xs: kink.ours(*xs).astype(np.float32).sum(), tuple(range(len(xs))))(*xs)

    with jax.enable_x64(False):
        grads = jaxtrain.autocast(gradient, jnp.bfloat16)(*(jnp.asarray(x, jnp.bfloat16) for x in kink.at))
    for ours, theirs in zip(grads, in_torch(kink.theirs, kink.at)[1], strict=True):
        np.testing.assert_allclose(ours.astype(np.float64), theirs, rtol=1e-2)


def test_the_gradient_of_the_norm_of_a_small_float16_product_does_not_overflow():
    def loss(x, norm):
        return 4096 * norm(x @ jnp.eye(2, dtype=np.float32))

    with jax.enable_x64(False):
        x = jnp.array([0.01, 0.02], np.float32)
        ours, jax_fn = (
            jax.grad(jaxtrain.autocast(lambda x, norm=norm: loss(x, norm), np.float16))(x)
            for norm in (sub.norm, jnp.linalg.norm)
        )
    np.testing.assert_allclose(ours, 4096 * x / np.linalg.norm(x), rtol=1e-3)
    assert not np.isfinite(jax_fn).all()


SECOND = {
    "abs": ([-1.0, 2.0],),
    "norm": ([3.0, 4.0],),
    "norm 3": ([3.0, -4.0],),
    "std": ([1.0, 2.0, 4.0],),
    "cosine_similarity": ([[1.0, 3.0]], [[2.0, -1.0]]),
    "atan2": ([1.0, -2.0], [0.5, 3.0]),
    "pow": ([1.5, 2.0], [3.0, 0.5]),
}


@pytest.mark.parametrize("case", SECOND)
def test_second_derivatives_equal_pytorch(case):
    kink, points = KINKS[case], SECOND[case]
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in points]
    first = torch.autograd.grad((kink.theirs(*inputs) ** 2).sum(), inputs, create_graph=True)
    theirs = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)

    def squared_gradient(*xs):
        grads = jax.grad(lambda *xs: (kink.ours(*xs) ** 2).sum(), tuple(range(len(xs))))(*xs)
        return sum((g**2).sum() for g in grads)

    ours = jax.grad(squared_gradient, tuple(range(len(points))))(*(jnp.asarray(x, np.float64) for x in points))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-12, atol=1e-12)


def test_the_std_of_a_constant_is_0_despite_the_rounding_of_its_mean():
    # PyTorch gives 2e-17 here, and its gradient is not 0.
    value, (grad,) = in_jax(sub.std, ([0.1] * 3,))
    assert value == 0
    assert not grad.any()
