"""Values and gradients at the ends of domains are PyTorch's: 0, 1, infinities, NaN and equal elements."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain.torch_import import from_torch
from tests.torch_import.ends import outcomes
from tests.torch_import.reference import Function, batch_of, compared, weighted
from tests.torch_import.samples import op_db
from tests.torch_import.test_op_db import UNDEFINED

Tensor = torch.Tensor
ENDS = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 3.0, -3.0, 6.0, 20.0, np.inf, -np.inf, np.nan])


def named(module: Any, names: str) -> dict[str, Any]:
    """Return functions of a module by their names."""
    return {name: getattr(module, name) for name in names.split()}


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **named(torch, "abs sqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh"),
    **named(torch, "asinh acosh atanh sinc erf erfc erfinv lgamma digamma sigmoid relu sign floor ceil trunc round"),
    **named(torch, "frac square neg nan_to_num angle i0 rad2deg isnan isinf signbit"),
    **named(F, "silu mish relu6 hardtanh leaky_relu gelu elu celu selu softplus logsigmoid hardsigmoid hardswish"),
    **named(F, "hardshrink softshrink softsign tanhshrink"),
    **named(torch.special, "ndtri log_ndtr entr erfcx i0e"),
    **{f"x**{p}": lambda x, p=p: x**p for p in (0, 0.5, 1, 2, 3, 4, -1, -2)},
    **{f"{p}**x": lambda x, p=p: p**x for p in (0.0, 0.5, 1.0, 2.0)},
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=1),
    "threshold": lambda x: F.threshold(x, 1, 5),
    "root of a half": lambda x: torch.where(x > 0, x.abs().sqrt(), 0),
    "logit": torch.logit,
    "logit with eps": lambda x: torch.logit(x, 0.25),
}
LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy_with_logits)
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **named(torch, "mul div maximum minimum fmax fmin atan2 fmod remainder copysign hypot logaddexp logaddexp2 xlogy"),
    "xlog1py": torch.special.xlog1py,
    **named(torch, "pow eq lt"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "clamp_min": lambda x, y: torch.clamp(x, min=y),
    "clamp_max": lambda x, y: torch.clamp(x, max=y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp from the end": lambda x, y: torch.lerp(x, y, 0.75),
    **{loss.__name__: lambda x, y, loss=loss: loss(x, y, reduction="none") for loss in LOSSES},
}
PROBABILITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
    "weighted": lambda x, y: F.binary_cross_entropy(x, y, weight=y.detach() + 1, reduction="none"),
    "kl_div": lambda x, y: F.kl_div(x.log(), y, reduction="none"),
}
DIFFERENT = {
    # PyTorch's own value in float32 alone.
    ("gelu", np.inf),
    # The sign of its infinite gradient at -0.
    ("logit", 0.0),
}


class Each(nn.Module):
    """Functions, each of arguments of its own."""

    def __init__(self, functions: list[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        return tuple(fn(*(next(given) for _ in range(len(tensors) // len(self.functions)))) for fn in self.functions)


def different_at(functions: dict[str, Any], points: list[np.ndarray], dtype: Any = np.float64) -> list[str]:
    """Return where elementwise functions differ at these points, for finite gradients from above and for NaN."""
    return different(functions, [np.stack([x, x]).astype(dtype) for x in points], (1.0, np.nan))


def different(functions: dict[str, Any], points: list[np.ndarray], above: tuple[float, ...] = ()) -> list[str]:
    """Return where functions of these points have other values, or other gradients where the value is not NaN.

    Args:
      functions: The functions by name.
      points: Their arguments.
      above: Factors of the gradient from above, for each part of the first axis. Of NaN, which PyTorch's formulas
        mask at some places, the gradient must be NaN wherever PyTorch's is.
    """
    dtype = points[0].dtype
    arrays = tuple(x for _ in functions for x in points)
    module = Each(list(functions.values()))
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    values = module(*tensors)

    shape = (-1, *[1] * (points[0].ndim - 1)) if above else ()
    factors = np.asarray(above or 1.0, dtype).reshape(shape)
    loss = weighted([y * torch.asarray(factors) for y in values if y.is_floating_point()], torch)
    wanted = torch.autograd.grad(loss, tensors, allow_unused=True)
    tolerance = 1e-9 if dtype == np.float64 else 1e-4
    with jax.enable_x64(dtype == np.float64):
        model = from_torch(module, arrays)

        def run(arrays: Any) -> Any:
            outputs = model({}, arrays)[0]
            floats = [y for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)]
            return weighted([y * factors for y in floats], jnp), outputs

        (_, found), grads = jax.device_get(jax.jit(jax.value_and_grad(run, has_aux=True))(arrays))
    wrong = []
    for i, (name, theirs) in enumerate(zip(functions, values, strict=True)):
        expected, count = theirs.detach().numpy(), len(points)
        defined = ~np.isnan(expected)
        pairs = [(found[i], expected)]
        for ours, gradient in zip(grads[i * count :][:count], wanted[i * count :][:count], strict=True):
            gradient = np.zeros_like(ours) if gradient is None else gradient.numpy()
            if above:
                # Where ours alone is NaN nothing is hidden.
                gradient[-1] = np.where(np.isnan(ours[-1]), np.nan, gradient[-1])
            elementwise = defined if ours.shape == expected.shape else defined.all()
            pairs.append((np.where(elementwise, ours, 0), np.where(elementwise, gradient, 0)))
        for kind, (ours, other) in enumerate(pairs):
            bad = ~np.isclose(ours, other, rtol=tolerance, atol=tolerance, equal_nan=True)
            for at in map(tuple, np.argwhere(bad)):
                point = tuple(float(x[at]) for x in points) if ours.shape == points[0].shape else ()
                if (name, *point) not in DIFFERENT:
                    wrong.append(f"{name}{point}: {'gradient' if kind else 'value'} {ours[at]} for {other[at]}")
    return wrong


SHARES = 6
"""The functions are tested in as many parts, of which the first is quick."""


@pytest.mark.parametrize("share", range(SHARES))
def test_elementwise_functions_at_ends(share: int) -> None:
    _compare_elementwise(share, SHARES, np.float64)


def test_elementwise_functions_at_ends_in_float32() -> None:
    _compare_elementwise(0, 1, np.float32)


def _compare_elementwise(share: int, shares: int, dtype: Any) -> None:
    wrong = different_at(_part(UNARY, share, shares), [ENDS], dtype)
    wrong += different_at(_part(BINARY, share, shares), list(np.meshgrid(ENDS, ENDS, indexing="ij")), dtype)
    if share == 0:
        wrong += different_at(PROBABILITIES, list(np.meshgrid([0.0, 1.0, 0.5, 1e-20], [0.0, 1.0, 0.5])), dtype)
    assert not wrong, "\n".join(wrong)


def _part(functions: dict[str, Any], share: int, shares: int) -> dict[str, Any]:
    return dict([*functions.items()][share::shares])


CHOOSING: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool1d": lambda x: F.max_pool1d(x[0], 2),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d overlapping": lambda x: F.max_pool2d(x, 3, 1, 1),
    "max_pool2d large": lambda x: F.max_pool2d(x, 5, 1, 2),
    "max_pool2d dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "max_pool2d of relu": lambda x: F.max_pool2d(F.relu(x), 2),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 3, return_indices=True)[0],
    "max_pool3d": lambda x: F.max_pool3d(x[None], 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 1, 2, 3]]), x.reshape(12, 8), mode="max"),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 2)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of an axis": lambda x: x.max(1)[0],
    "min of an axis": lambda x: x.min(2)[0],
    "aminmax": lambda x: x.aminmax(dim=1)[0],
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "cummax": lambda x: x.cummax(1)[0],
    "cummin": lambda x: x.cummin(2)[0],
    "prod": lambda x: x.prod(2),
    "prod of all": lambda x: x.prod(),
    "cumprod": lambda x: x.cumprod(1),
    "logsumexp": lambda x: x.logsumexp(1),
    **{
        f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, dim=2)
        for p in (0, 1, 2, 3, np.inf, -np.inf, -1, 0.5)
    },
    **{f"normalize {p}": lambda x, p=p: F.normalize(x, p, 2) for p in (1, 2, np.inf, -1)},
    "std": lambda x: x.std(2),
    "var": lambda x: x.var(2),
    "softmax": lambda x: F.softmax(x, 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=2),
    **{f"cdist {p}": lambda x, p=p: torch.cdist(x, x.flip(0), p) for p in (1.0, 2.0, 3.0)},
    "pdist": lambda x: F.pdist(x[0]),
    **{
        f"scatter_reduce {how}": lambda x, how=how: x.scatter_reduce(1, torch.arange(8) % 3 * (x.detach() > 2), x, how)
        for how in ("sum", "mean", "amax", "amin", "prod")
    },
    "scatter_reduce without itself": lambda x: x.scatter_reduce(
        1, torch.arange(8).expand(2, 6, 8) % 3, x, "amax", include_self=False
    ),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x[:, 0], torch.tensor([[1, 0, -1] + [0] * 5] * 2)),
    **{
        f"multi_margin_loss {p}": lambda x, p=p: F.multi_margin_loss(x[:, 0], torch.arange(2), p=p, reduction="none")
        for p in (1, 2)
    },
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, 2 * (x.detach() > 0).double() - 1),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.flip(1), x.flip(0)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x.flip(0), torch.ones_like(x)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x[:, 0], x[:, 1], torch.tensor([1, -1])),
}
"""Functions with kinks of [2, 6, 8]."""


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("values", [(0.0, 1.0, -1.0), (0.0,), (1.0,), (0.0, -0.0, 2.0, 0.5, -1.0)], ids=str)
def test_functions_with_equal_elements(values: tuple[float, ...], share: int) -> None:
    wrong = different(_part(CHOOSING, share, SHARES), [np.random.default_rng(0).choice(values, (2, 6, 8))])
    assert not wrong, "\n".join(wrong)


def test_the_row_at_padding_idx_has_no_gradient() -> None:
    ids = torch.tensor([[0, 2, 1], [2, 2, 0]])
    module = Function(
        lambda self, x: (self.table(ids) * x, self.bag(ids)),
        table=nn.Embedding(4, 3, padding_idx=2, dtype=torch.float64),
        bag=nn.EmbeddingBag(4, 3, padding_idx=2, mode="sum", dtype=torch.float64),
    )
    differences, _ = compared(module, batch_of(3))
    assert max(differences) < 1e-12


def test_all_results_of_a_region_without_gradient_are_detached() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            a, b, c = self.w * x, self.w + x, (self.w * x).split(1)
        return self.w * (a + 2 * b + 3 * torch.cat(c))

    differences, _ = compared(Function(forward), batch_of(3))
    assert max(differences) < 1e-12


def test_singular_values_of_a_matrix_that_is_not_finite_are_nan_and_so_are_their_gradients() -> None:
    """LAPACK would not end."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return u, s, vh, torch.linalg.svdvals(x), torch.linalg.matrix_norm(x, "nuc"), torch.linalg.pinv(x)

    x = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
    model = from_torch(Function(forward).float(), x)
    wrong = x.copy()
    wrong[1, 2, 0], wrong[2, 0, 1] = np.inf, np.nan

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(x: Any) -> Any:
        outputs = model(model.params, x)[0]
        return weighted(outputs[1:], jnp), outputs

    (_, expected), grads = jax.device_get(run(x))
    (_, found), grads_of_wrong = jax.device_get(run(wrong))
    for ours, theirs in [*zip(found, expected, strict=True), (grads_of_wrong, grads)]:
        assert np.isnan(ours[1]).any()
        assert np.isnan(ours[2]).any()
        np.testing.assert_array_equal(ours[[0, 3]], theirs[[0, 3]])
    np.testing.assert_allclose(expected[3], np.linalg.svd(x, compute_uv=False), rtol=1e-5)


PARTS = 64
ELSEWHERE = {"nn.functional.multi_margin_loss"}
"""Functions of Python that an import replaces, which `op_db` holds as they were. `CHOOSING` has them."""
UNSORTED = {"bucketize", "searchsorted"}
"""Functions of sorted numbers, which these are not."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_no_operation_differs_at_ends(part: int) -> None:
    left_out = UNDEFINED | ELSEWHERE | UNSORTED
    defined = [info for info in op_db() if torch.float64 in info.supported_dtypes("cpu") and info.name not in left_out]
    wrong = [
        f"{info.name}.{info.variant_test_name}: {outcome.detail}"
        for info in defined[part::PARTS]
        for outcome in outcomes(info, seed=part)
        if outcome.kind == "wrong"
    ]
    assert not wrong, "\n".join(wrong)
