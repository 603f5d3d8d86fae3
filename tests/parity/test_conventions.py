"""What a diagnosis computes under another convention equals the formula of that convention."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax, softmax
from torch import Tensor, nn
from torch.nn import functional as F

from parity.explain.conventions.substitution import Substitution, written_out
from parity.explain.conventions.torch_functions import (
    ATTENTION,
    CROSS,
    EPSILONS,
    OPERATIONS,
    POOLS,
    OperationConvention,
)
from parity.sides.calls import bound, called

CONVENTIONS = {(convention.of, convention.has): convention for convention in OPERATIONS}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def computed(of: str, has: str, *args: Any, **kwargs: Any) -> Any:
    """Return what JAX computes under a convention, from a call of PyTorch's function."""
    function = called(of)
    return CONVENTIONS[of, has].computes(function, bound(function, args, kwargs))


def same(ours: Any, expected: Any) -> None:
    np.testing.assert_allclose(ours.numpy(force=True), np.asarray(expected), rtol=1e-12, atol=1e-14)


def normed(x: Any, axes: Any, eps: float, ddof: int = 0) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, ddof=ddof, keepdims=True) + eps)


X = drawn(4, 3, 5)
W, B = drawn(3, 5, seed=1), drawn(3, 5, seed=2)


def test_norms_have_the_epsilon_of_the_convention() -> None:
    x = 1e-2 * X
    for eps in EPSILONS:
        has = f"eps is {eps:.3g}"
        same(computed("layer_norm", has, x, (5,), eps=1e-4), normed(x.numpy(), -1, eps))
        same(computed("group_norm", has, x, 1, eps=1e-4), normed(x.numpy(), (1, 2), eps))
        same(computed("batch_norm", has, x, None, None, training=True, eps=1e-4), normed(x.numpy(), (0, 2), eps))
        same(computed("instance_norm", has, x, eps=1e-4), normed(x.numpy(), 2, eps))
        same(computed("rms_norm", has, x, (5,), eps=1e-4), x / ((x**2).mean(-1, keepdim=True) + eps).sqrt())


def test_layer_norms_subtract_no_mean_or_divide_by_the_unbiased_variance() -> None:
    x = X.numpy()
    root = np.sqrt((x**2).mean((1, 2), keepdims=True) + 0.3)
    same(computed("layer_norm", "subtracts no mean (RMSNorm)", X, (3, 5), W, B, 0.3), x / root * W.numpy() + B.numpy())
    unbiased = normed(x, (1, 2), 0.3, ddof=1)
    same(computed("layer_norm", "variance is unbiased", X, (3, 5), W, B, 0.3), unbiased * W.numpy() + B.numpy())
    same(computed("layer_norm", "variance is unbiased", X, (3, 5), eps=0.3), unbiased)
    same(computed("layer_norm", "variance is unbiased", X, (3, 5), bias=B, eps=0.3), unbiased + B.numpy())


def test_batch_norms_follow_their_conventions_in_values_and_buffers() -> None:
    w, b, x, n = W[:, 0], B[:, 0], X.numpy(), 4 * 5
    mean, var = x.mean((0, 2)), x.var((0, 2))

    def batch_norm(has: str) -> list[Tensor]:
        buffers = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([4.0, 5.0, 6.0], dtype=torch.float64)
        out = computed("batch_norm", has, X, *buffers, w, b, training=True, momentum=0.3, eps=0.1)
        return [out, *buffers]

    def affine(y: Any) -> Any:
        return y * w.numpy()[:, None] + b.numpy()[:, None]

    old_mean, old_var = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    own = affine(normed(x, (0, 2), 0.1))
    running = affine((x - old_mean[:, None]) / np.sqrt(old_var[:, None] + 0.1))
    new_mean, new_var = 0.7 * old_mean + 0.3 * mean, 0.7 * old_var + 0.3 * var * n / (n - 1)
    expected = {
        "variance is unbiased": (affine(normed(x, (0, 2), 0.1, ddof=1)), new_mean, new_var),
        "statistics are the running ones": (running, new_mean, new_var),
        "momentum is the old value's weight": (
            *(own, 0.3 * old_mean + 0.7 * mean),
            0.3 * old_var + 0.7 * var * n / (n - 1),
        ),
        "running variance is biased": (own, new_mean, 0.7 * old_var + 0.3 * var),
    }
    for has, values in expected.items():
        for found, value in zip(batch_norm(has), values, strict=True):
            same(found, value)
    for has in ("statistics are the running ones", "running variance is biased"):  # without buffers nothing differs
        same(computed("batch_norm", has, X, None, None, training=True, eps=0.1), normed(x, (0, 2), 0.1))


def test_filters_are_padded_to_same_with_the_odd_element_at_the_end() -> None:
    x = drawn(2, 3, 5, 6)
    kernel = drawn(4, 3, 3, 3, seed=1)
    has = "padding is SAME"
    # By hand: ⌈5/2⌉ outputs take 7 rows, one more at either end; ⌈6/2⌉ take 7 columns, one more at the end.
    padded = F.conv2d(F.pad(x, (0, 1, 1, 1)), kernel, stride=2)
    same(computed("conv2d", has, x, kernel, stride=2, padding=1), padded)
    dilated = F.conv2d(F.pad(x, (2, 2, 1, 1)), kernel, dilation=(1, 2))
    same(computed("conv2d", has, x, kernel, padding=1, dilation=(1, 2)), dilated)
    row, column = drawn(2, 3, 6), kernel[:, :, 0]
    same(computed("conv1d", has, row, column, stride=4), F.conv1d(F.pad(row, (0, 1)), column, stride=4))
    same(computed("conv2d", has, x, kernel[:, :, :1, :1], stride=2), F.conv2d(x, kernel[:, :, :1, :1], stride=2))
    same(computed("max_pool2d", has, x - 9, 2, padding=1), F.max_pool2d(F.pad(x - 9, (0, 0, 0, 1), value=-np.inf), 2))
    same(computed("avg_pool2d", has, x, 3, 2), F.avg_pool2d(F.pad(x, (0, 1, 1, 1)), 3, 2))
    for of in POOLS:
        y = x if of.endswith("2d") else x[0]
        same(computed(of, "padding is 0", y, 3, 2, 1), called(of)(y, 3, 2))
        same(computed(of, "stride is 1", y, 3, 2, 1), called(of)(y, 3, 1, 1))


def test_kernels_are_mirrored_along_every_axis_of_space() -> None:
    x, kernel = drawn(2, 3, 5, 6), drawn(3, 4, 3, 3, seed=1)
    mirrored = torch.from_numpy(kernel.numpy()[:, :, ::-1, ::-1].copy())
    turned = mirrored.transpose(0, 1)
    same(computed("conv2d", "kernel is mirrored", x, kernel.transpose(0, 1), padding=1), F.conv2d(x, turned, padding=1))
    same(computed("conv_transpose2d", "kernel is mirrored", x, kernel), F.conv_transpose2d(x, mirrored))


def resized(x: Any, size: int) -> Any:
    """Resize the last axis by Keys' cubic with a = -1/2 around the middles of pixels, without those beyond the edge."""
    n = x.shape[-1]
    at = (np.arange(size) + 0.5) * n / size - 0.5
    t = np.abs(at[:, None] - np.arange(n))
    weights = np.where(t <= 1, 1.5 * t**3 - 2.5 * t**2 + 1, np.where(t < 2, -0.5 * (t**3 - 5 * t**2 + 8 * t - 4), 0))
    return x @ (weights / weights.sum(1, keepdims=True)).T


def test_resizing_has_another_cubic_and_other_pixels() -> None:
    x, cubic = drawn(1, 2, 4, 6), "cubic has a=-0.5"
    expected = resized(resized(x.numpy(), 3).swapaxes(2, 3), 7).swapaxes(2, 3)
    same(computed("interpolate", cubic, x, (7, 3), mode="bicubic"), expected)
    others: tuple[dict[str, Any], ...] = {"mode": "bilinear"}, {"mode": "bicubic", "align_corners": True}
    for other in others:
        same(computed("interpolate", cubic, x, (7, 3), **other), F.interpolate(x, (7, 3), **other))
    smooth: dict[str, Any] = {"mode": "bicubic", "antialias": True}
    same(computed("interpolate", cubic, x, (3, 3), **smooth), F.interpolate(x, (3, 3), **smooth))
    nearest = computed("interpolate", "nearest is of half pixels", x, (3, 4))
    same(nearest, x[:, :, [0, 2, 3]][..., [0, 2, 3, 5]])  # floor((i + 1/2) · old / new)


def test_activations_and_softmax_follow_their_conventions() -> None:
    x = X.numpy()
    same(computed("gelu", "is x·sigmoid(1.702x)", X), x / (1 + np.exp(-1.702 * x)))
    tanh = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    same(computed("gelu", "is the tanh approximation", X), tanh)
    same(computed("gelu", "is that of torch.nn.functional", X, approximate="tanh"), tanh)
    same(computed("gelu", "is exact", X, approximate="tanh"), F.gelu(X))
    for axis in (-1, 0, 1, 2):
        same(computed("softmax", f"runs over axis {axis}", X, 1), softmax(x, axis))
        same(computed("log_softmax", f"runs over axis {axis}", X, dim=0), log_softmax(x, axis))


def test_deviations_have_the_other_divisor() -> None:
    has, x = "divisor is the other: n, or n - 1", X.numpy()
    for of, numpy in (("var", np.var), ("std", np.std)):
        same(computed(of, has, X), numpy(x))
        same(computed(of, has, X, 1), numpy(x, 1))
        same(computed(of, has, X, (0, 2), keepdim=True), numpy(x, (0, 2), keepdims=True))
        same(computed(of, has, X, 1, unbiased=False), numpy(x, 1, ddof=1))
        same(computed(of, has, X, 1, correction=0), numpy(x, 1, ddof=1))
        same(computed(of, has, X, False), numpy(x, ddof=1))
        same(computed(of, has, X, True), numpy(x))


def test_losses_are_reduced_weighted_and_ignored_by_their_conventions() -> None:
    z, y, weight = drawn(5, 3), torch.tensor([0, 2, -100, 1, -100]), torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    log_p = log_softmax(z.numpy(), 1)
    kept, counted = -log_p[[0, 1, 3], [0, 2, 1]], -log_p[range(5), [0, 2, 0, 1, 0]]
    of_each = {"cross_entropy": (z, y), "nll_loss": (torch.from_numpy(log_p), y)}
    for of in CROSS:
        same(computed(of, "classes weigh alike", *of_each[of], weight), kept.mean())
        same(computed(of, "ignored labels count, as class 0", *of_each[of]), counted.mean())
        same(computed(of, "mean is over ignored labels too", *of_each[of]), kept.sum() / 5)
        same(computed(of, "reduction is the sum", *of_each[of]), kept.sum())
        same(computed(of, "reduction is the mean", *of_each[of], reduction="sum"), kept.mean())
    same(computed("cross_entropy", "label_smoothing is 0", z, y, label_smoothing=0.3), kept.mean())
    a, b = drawn(4, 3), drawn(4, 3, seed=1)
    error, d = (a - b).numpy(), np.abs((a - b).numpy())
    huber = np.where(d < 0.4, d * d / 2, 0.4 * (d - 0.2)).mean()
    same(computed("mse_loss", "is halved (optax.l2_loss)", a, b), (error**2).mean() / 2)
    same(computed("smooth_l1_loss", "is Huber's, not divided by beta", a, b, beta=0.4), huber)
    same(computed("huber_loss", "is divided by delta (smooth L1)", a, b, delta=0.4), huber / 0.4)
    p = torch.softmax(b, 1)
    divergence = (p * (p.log() - a)).numpy().sum()
    same(computed("kl_div", "divides by rows only", a, p, reduction="mean"), divergence / 4)


def test_attention_follows_its_conventions() -> None:
    q, k, v = (drawn(2, 4, 3, 6, seed=i) for i in range(3))
    causal, mask = np.tril(np.ones((3, 3), bool)), np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], bool)

    def attended(scores: Any, shown: Any = True, axis: int = -1) -> Any:
        weights = softmax(np.where(shown, scores, -np.inf), axis)
        return weights @ v.numpy()

    scores = q.numpy() @ k.numpy().swapaxes(2, 3)
    scaled, hidden = scores / np.sqrt(6), {"attn_mask": torch.from_numpy(mask)}
    attend = lambda has, **options: computed(ATTENTION, has, q, k, v, **options)  # noqa: E731
    same(attend("scores are not scaled"), attended(scores))
    same(attend("scores are divided by the width"), attended(scores / 6))
    same(attend("scores are divided by the width", is_causal=True), attended(scores / 6, causal))
    same(attend("attends to what is masked", **hidden), attended(scaled, ~mask))
    bias = drawn(3, 3, seed=5)
    same(attend("scores are divided by the width", attn_mask=bias), attended(scores / 6 + bias.numpy()))
    zeros = torch.from_numpy(np.where(mask, 0.0, -np.inf))
    same(attend("attends to what is masked", attn_mask=zeros), attended(scaled, ~mask))
    same(attend("has no mask", is_causal=True), attended(scaled))
    same(attend("has no mask", **hidden), attended(scaled))
    later = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)
    same(attend("mask shows the next position too", is_causal=True), attended(scaled, later))
    same(attend("softmax runs over the queries"), attended(scaled, axis=-2))
    same(attend("softmax runs over the heads", scale=0.5), attended(scores / 2, axis=-3))
    grouped = computed(ATTENTION, "softmax runs over the queries", q, k[:, :2], v[:, :2], enable_gqa=True)
    repeated = [np.repeat(x.numpy()[:, :2], 2, 1) for x in (k, v)]
    same(grouped, softmax(q.numpy() @ repeated[0].swapaxes(2, 3) / np.sqrt(6), -2) @ repeated[1])


def slopes(of: str, has: str, x: Any, *args: Any, **kwargs: Any) -> tuple[list[float], list[float]]:
    """Return values and gradients under a convention."""
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = computed(of, has, x, *args, **kwargs)
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


def test_slopes_at_kinks_and_ties_are_those_of_the_convention() -> None:
    x = [-2.0, -1.0, 0.0, 1.0, 2.0]
    assert slopes("abs", "slope at 0 is 1", x) == ([2, 1, 0, 1, 2], [-1, -1, 1, 1, 1])
    half = "slope at its bounds is 1/2"
    assert slopes("clamp", half, x, -1, 1) == ([-1, -1, 0, 1, 1], [0, 0.5, 1, 0.5, 0])
    assert slopes("clamp", half, x, min=0) == ([0, 0, 0, 1, 2], [0, 0, 0.5, 1, 1])
    assert slopes("clamp", half, x, max=0) == ([-2, -1, 0, 0, 0], [1, 1, 0.5, 0, 0])
    assert slopes("relu", "slope at 0 is 1/2", x) == ([0, 0, 0, 1, 2], [0, 0, 0.5, 1, 1])
    assert slopes("leaky_relu", "slope at 0 is 1", x, 0.25) == ([-0.5, -0.25, 0, 1, 2], [0.25, 0.25, 1, 1, 1])
    assert slopes("hardtanh", "slope at its bounds is 1", x) == ([-1, -1, 0, 1, 1], [0, 1, 1, 1, 0])
    tied = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    for of, values, at, shares in (
        ("max", [[3], [2]], [[1], [0]], [[0, 0.5, 0.5], [1, 0, 0]]),
        ("min", [[-3], [-2]], [[1], [0]], [[0, -0.5, -0.5], [-1, 0, 0]]),
    ):
        given = tied if of == "max" else -tied
        taken = computed(of, "ties share it", given, 1, keepdim=True)
        (grad,) = torch.autograd.grad(taken.values.sum(), tied)
        assert (taken.values.tolist(), taken.indices.tolist(), grad.tolist()) == (values, at, shares)
        assert computed(of, "ties share it", given).item() == values[0][0]
        other = torch.zeros_like(tied)
        same(computed(of, "ties share it", given, other), getattr(torch, of)(given, other).detach())


def test_padding_rows_have_a_gradient_under_the_convention() -> None:
    table = drawn(3, 2).requires_grad_()
    computed("embedding", "padding_idx has a gradient", torch.tensor([0, 1, 1]), table, 1).sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [[1, 1], [2, 2], [0, 0]]


class Block(nn.Module):
    """An activation in a part, one of its own, and one that it writes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.GELU(), nn.GELU(), Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.second(self.first(x))) + self.own(x)


class Tanh(nn.Module):
    """The tanh approximation of GELU by elementary operations."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_a_convention_replaces_the_calls_in_its_modules_after_some_losses() -> None:
    x = drawn(5)
    double = OperationConvention("gelu", "is doubled", "", lambda call, a: 2 * call(a["input"]))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.gelu(model(batch["x"]))

    def under(*paths: str, after: int = 0) -> Substitution:
        return Substitution(double, frozenset(paths), after)

    g, t = F.gelu, Tanh()
    expected: dict[tuple[str, ...], Callable[[Tensor], Tensor]] = {
        (): lambda x: g(g(g(g(x))) + t(x)),
        ("first",): lambda x: g(g(g(2 * g(x))) + t(x)),
        ("second",): lambda x: g(g(2 * g(g(x))) + t(x)),
        ("Block",): lambda x: g(2 * g(g(g(x))) + t(x)),
        ("own",): lambda x: g(g(g(g(x))) + 2 * g(x)),
        ("loss",): lambda x: 2 * g(g(g(g(x))) + t(x)),
        ("first", "loss"): lambda x: 2 * g(g(g(2 * g(x))) + t(x)),
    }
    for paths, values in expected.items():
        same(under(*paths).watched(loss)(Block(), {"x": x}), values(x))
    late = under("loss", after=2).watched(loss)
    for values in (expected[()], expected[()], expected["loss",], expected["loss",]):
        same(late(Block(), {"x": x}), values(x))
    watching = Substitution(None, frozenset(), 1)
    watched = watching.watched(loss)
    watched(Block(), {"x": x})
    assert not watching.calls
    same(watched(Block(), {"x": x}), expected[()](x))
    assert [call for call in watching.calls if call[0] == "gelu"] == [
        *(("gelu", "first"), ("gelu", "second"), ("gelu", "Block"), ("gelu", "own"), ("gelu", "loss"))
    ]


def test_a_module_that_writes_a_function_out_is_recognized_by_its_values() -> None:
    class Norm(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(W[0].clone()), 0.25
            self.bias = nn.Parameter(B[0].clone()) if bias else None

    rms, layer = Norm(False), Norm(True)
    of_rms = written_out(rms, (X,), X / ((X**2).mean(-1, keepdim=True) + 0.25).sqrt() * W[0])
    assert of_rms is not None
    assert (of_rms[0], of_rms[1]["normalized_shape"], of_rms[1]["eps"]) == ("rms_norm", (5,), 0.25)
    of_layer = written_out(layer, (X,), F.layer_norm(X, (5,), W[0], B[0], 0.25))
    assert of_layer is not None
    assert (of_layer[0], of_layer[1]["bias"]) == ("layer_norm", layer.bias)
    exact, tanh = (written_out(Tanh(), (X,), F.gelu(X, approximate=how)) for how in ("none", "tanh"))
    assert exact is not None
    assert tanh is not None
    assert (exact[1]["approximate"], tanh[1]["approximate"]) == ("none", "tanh")
    out = F.gelu(X)
    assert written_out(nn.GELU(), (X,), out) is None  # PyTorch's own
    assert written_out(Tanh(), (X, X), out) is None
    assert written_out(Tanh(), (X[0],), out) is None
    assert written_out(nn.Sequential(Tanh()), (X,), out) is None
    assert written_out(Block(), (X,), out) is None
    assert written_out(Tanh(), (X,), out * (1 + 1e-5)) is None
    assert written_out(Tanh(), (X,), (out, out)) is None
    assert written_out(Tanh(), (X.long(),), X.long()) is None
