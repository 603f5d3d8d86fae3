"""Operations with all values of their options, called directly: PyTorch's values and gradients in float64."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain.torch_import.ops import TABLE

BOUND = 1e-12
NONE, MEAN, SUM = range(3)


@pytest.fixture(autouse=True)
def as_in_an_import() -> Iterator[None]:
    with jax.enable_x64(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng((seed, *shape)).standard_normal(shape))


class Calls:
    """Calls of overloads, whose values and gradients are computed by one program; NumPy arrays have no gradient."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._programs: list[Callable[..., Any]] = []
        self._trained: list[list[jax.Array]] = []
        self._expected: list[list[Any]] = []

    def add(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Add a call, with the values and gradients of PyTorch."""
        packet, _, overload = name.partition(".")
        leaves, tree = jax.tree.flatten((args, kwargs))
        trained = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]

        def outputs(fn: Any, others: list[Any], values: Sequence[Any]) -> list[Any]:
            given = dict(zip(trained, values, strict=True))
            args, kwargs = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(others)])
            return jax.tree.leaves(fn(*args, **kwargs))

        tensors = [leaves[i].clone().requires_grad_() for i in trained]
        others = [torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in leaves]
        expected = outputs(getattr(getattr(torch.ops.aten, packet), overload), others, tensors)
        differentiable = [i for i, y in enumerate(expected) if y.requires_grad]
        weights = [normal(*expected[i].shape, seed=1) for i in differentiable]
        trained_outputs = [expected[i] for i in differentiable]
        gradients = torch.autograd.grad(trained_outputs, tensors, weights, allow_unused=True) if tensors else ()
        arrays = [np.asarray(x) if isinstance(x, torch.Tensor | np.ndarray) else x for x in leaves]
        arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]

        def with_gradients(values: Any) -> Any:
            def ours(*values: Any) -> Any:
                found = outputs(TABLE[f"aten.{name}"], arrays, values)
                return [found[i] for i in differentiable], found

            _, pulled_back, found = jax.vjp(ours, *values, has_aux=True)
            return [*found, *pulled_back([jnp.asarray(w.numpy()) for w in weights])]

        self._names.append(f"{name} {args} {kwargs}")
        self._programs.append(with_gradients)
        self._trained.append([arrays[i] for i in trained])
        self._expected.append([None if y is None else y.detach().numpy() for y in (*expected, *gradients)])

    def check(self) -> None:
        """Compare all values and gradients."""
        run = jax.jit(lambda trained: [fn(x) for fn, x in zip(self._programs, trained, strict=True)])
        for name, ours, theirs in zip(self._names, run(self._trained), self._expected, strict=True):
            for x, y in zip(ours, theirs, strict=True):
                wanted = np.zeros(x.shape) if y is None else y
                assert x.shape == wanted.shape
                atol = BOUND * np.abs(wanted).max(initial=1.0)
                np.testing.assert_allclose(x, wanted, rtol=0, atol=atol, err_msg=name)


def test_samples_at_grids() -> None:
    """Bilinear, nearest and bicubic, with zeros, border and reflection outside of the image, far from it too."""
    calls = Calls()
    linear, nearest, cubic = range(3)
    zeros, border, reflection = range(3)
    x, grid = normal(2, 1, 4, 3), 1.5 * normal(2, 1, 3, 2)
    for options in ((linear, zeros, False), (linear, border, True), (linear, reflection, False)):
        calls.add("grid_sampler_2d.default", x, grid, *options)
    calls.add("grid_sampler_2d.default", x, grid, nearest, zeros, False)
    calls.add("grid_sampler_2d.default", x, grid, cubic, reflection, True)
    # Of an image of one pixel nothing is reflected.
    calls.add("grid_sampler_2d.default", x[..., :1, :1], grid, linear, reflection, True)
    calls.check()


def test_solutions_of_linear_systems() -> None:
    calls = Calls()
    a, b = normal(2, 3, 3) + 2 * torch.eye(3), normal(2, 3, 3, seed=1)
    for left, right in ((True, b), (False, b), (True, b[0]), (True, normal(3))):
        calls.add("_linalg_solve_ex.default", a, right, left=left)
    for upper, other in itertools.product((False, True), repeat=2):
        calls.add("linalg_solve_triangular.default", a, b, upper=upper, left=other, unitriangular=other)
        calls.add("triangular_solve.default", b, a, upper, other, not other)
    for upper, factor in ((False, a.tril()), (True, a.triu())):
        calls.add("cholesky_solve.default", b, factor, upper)
        calls.add("cholesky_inverse.default", factor, upper)
    factors, pivots = torch.linalg.lu_factor(a.flip(1))
    for left, adjoint in itertools.product((False, True), repeat=2):
        calls.add("linalg_lu_solve.default", factors, pivots, b, left=left, adjoint=adjoint)
    calls.check()


def test_pseudoinverses() -> None:
    """A singular value counts as 0 up to the tolerance, which is the larger dimension times epsilon by default."""
    calls = Calls()
    epsilon = float(np.finfo(np.float64).eps)
    x = torch.zeros(40, 2, 9, dtype=torch.float64)
    x[:, 0, 0], x[:, 1, 1] = 2, 2 * epsilon * torch.linspace(0.5, 20, 40)
    kept = np.linspace(0.5, 20, 40) > 9

    def inverse_of_second(**tolerances: Any) -> np.ndarray:
        name = f"linalg_pinv.atol_rtol_{'tensor' if 'atol' in tolerances else 'float'}"
        given = {key: jnp.asarray(value) for key, value in tolerances.items()}
        return np.asarray(TABLE[f"aten.{name}"](jnp.asarray(x.numpy()), **given)[:, 1, 1])

    np.testing.assert_array_equal(inverse_of_second() > 0, kept)
    # An absolute tolerance above 0 is the only one.
    least = np.where(np.arange(40) % 2, 1e-30, 0.0)
    np.testing.assert_array_equal(inverse_of_second(atol=least) > 0, kept | (least > 0))

    x = normal(2, 3, 3)
    tolerance = float(torch.linalg.svdvals(x)[0, -1]) * 1.0001
    relative = tolerance / float(torch.linalg.svdvals(x)[0, 0])
    for options in ({}, {"atol": tolerance}, {"rtol": relative}, {"atol": tolerance, "rtol": relative / 2}):
        calls.add("linalg_pinv.atol_rtol_float", x, **options)
    calls.add("linalg_pinv.atol_rtol_float", normal(2, 3), hermitian=False)
    calls.add("linalg_pinv.atol_rtol_float", x + x.mT, hermitian=True)
    calls.add("linalg_pinv.default", x, relative)
    calls.check()


def test_losses() -> None:
    calls = Calls()
    x, y = normal(4, 3), normal(4, 3, seed=1)
    probabilities, weight = torch.sigmoid(y), np.array([0.5, 2.0, 1.0])
    labels, log_probs = torch.tensor([2, 0, -100, 1]), torch.log_softmax(x, 1)
    signs = torch.where(y > 0, 1, -1)
    sets = torch.tensor([[2, 0, -1], [-1, 1, 2], [1, -1, 0], [0, 1, 2]])
    for reduction, classes, smoothing in ((NONE, None, 0.1), (MEAN, weight, 0.1), (SUM, weight, 0.0)):
        calls.add("cross_entropy_loss.default", x, labels, classes, reduction, -100, smoothing)
        calls.add("cross_entropy_loss.default", x, probabilities, classes, reduction, -100, smoothing)
        calls.add("nll_loss_forward.default", log_probs, labels, classes, reduction, -100)
        calls.add("binary_cross_entropy.default", probabilities, torch.sigmoid(x), classes, reduction)
        name = "binary_cross_entropy_with_logits.default"
        calls.add(name, x, probabilities, classes, classes if classes is None else 3 * weight, reduction)
        calls.add("multilabel_margin_loss_forward.default", x, sets, reduction)
        calls.add("kl_div.default", log_probs, probabilities, reduction)
    for values in (x[0], x[..., None]):
        target = labels[0] if values.ndim == 1 else labels[:, None]
        calls.add("cross_entropy_loss.default", values, target)
        calls.add("nll_loss_nd.default", values, target)
    calls.add("nll_loss_forward.default", log_probs, labels.clamp(min=0), None, MEAN, 1)
    calls.add("nll_loss_forward.default", x[0], labels[0], None, NONE, 1)
    calls.add("multilabel_margin_loss_forward.default", x[0], sets[0], MEAN)
    calls.add("kl_div.default", log_probs, torch.log(probabilities), log_target=True)
    calls.add("soft_margin_loss.default", x, signs)
    calls.add("l1_loss.default", x, y)
    for name, *options in (("mse_loss",), ("smooth_l1_loss", 0.7), ("huber_loss", 0.7)):
        calls.add(f"{name}.default", x, y, SUM, *options)
    calls.check()


def test_resized_images() -> None:
    calls, sizes = Calls(), ((1, 4), (5, 2), (3, 9))
    modes = ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    for mode, size, corners in itertools.product(modes, sizes, (False, True)):
        calls.add(f"{mode}.vec", normal(1, 1, 3, 7), size, corners, None)
    for mode, scales in itertools.product(modes, ([0.7, 2.3], [1.5, 0.4])):
        calls.add(f"{mode}.vec", normal(1, 1, 3, 7), None, False, scales)
    calls.add("_upsample_bilinear2d_aa.default", normal(1, 1, 3, 7), (2, 9), False, 0.7, 1.4)
    calls.check()


def test_windows_of_maxima() -> None:
    calls, x = Calls(), normal(1, 2, 7, 6)
    for kernel, dilation, ceil in ((2, 1, True), (3, 2, False), (3, 2, True)):
        calls.add("max_pool2d_with_indices.default", x, [kernel, 2], [1, 3], 1, dilation, ceil)
    calls.add("adaptive_max_pool2d.default", x, (5, 4))
    calls.check()


def test_histograms() -> None:
    calls, x = Calls(), normal(4, 9)
    for values, bins, low, high in (
        (x, 5, 0, 0),
        (x + 10, 7, 0, 0),
        (x - 10, 4, -11, -9),
        (x, 3, 1, 1),
        (x * 0, 4, 0, 0),
    ):
        calls.add("histc.default", values.numpy(), bins, low, high)
    calls.check()


def test_embeddings() -> None:
    calls = Calls()
    for padding, scaled in itertools.product((-1, 0, 2), (False, True)):
        calls.add("embedding.default", normal(4, 3), np.array([[0, 2, 2], [1, 0, 0]]), padding, scaled)
    calls.check()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 4), (3, 3)])
def test_singular_vectors_are_a_basis_of_the_shape_of_pytorchs(shape: tuple[int, ...], full: bool) -> None:
    """Vectors are unique up to their signs, and those that `full_matrices` adds have no gradient."""
    x, k = normal(*shape), min(shape[-2:])

    def product(x: Any) -> Any:
        u, s, vh = TABLE["aten._linalg_svd.default"](x, full)
        return u[..., :k] * s[..., None, :] @ vh[..., :k, :], (u, s, vh)

    found, pulled_back, parts = jax.vjp(product, jnp.asarray(x.numpy()), has_aux=True)
    for ours, theirs in zip(parts, torch.linalg.svd(x, full), strict=True):
        assert ours.shape == theirs.shape
    u, s, vh = map(np.asarray, parts)
    np.testing.assert_allclose(s, torch.linalg.svdvals(x), rtol=BOUND)
    for basis in (u.swapaxes(-1, -2) @ u, vh @ vh.swapaxes(-1, -2)):
        np.testing.assert_allclose(basis, np.broadcast_to(np.eye(basis.shape[-1]), basis.shape), rtol=0, atol=BOUND)
    weights = normal(*shape, seed=1).numpy()
    np.testing.assert_allclose(found, x, rtol=0, atol=BOUND)
    np.testing.assert_allclose(pulled_back(jnp.asarray(weights))[0], weights, rtol=0, atol=BOUND)


@pytest.mark.parametrize("n", range(4))
def test_polygammas_and_their_derivatives_are_those_of_pytorch(n: int) -> None:
    """XLA's series is accurate to 1e-9."""
    x = torch.tensor([0.3, 1.7, 8.0, -0.6], dtype=torch.float64, requires_grad=True)
    expected = torch.special.polygamma(n, x)
    (derivative,) = torch.autograd.grad(expected.sum(), x)
    ours, pulled_back = jax.vjp(lambda x: TABLE["aten.polygamma.default"](n, x), jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(ours, expected.detach(), rtol=1e-9)
    np.testing.assert_allclose(pulled_back(jnp.ones(4))[0], derivative, rtol=1e-9)
