"""Each convention, planted in the JAX side of a small case, is diagnosed; other bugs have no diagnosis."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax import lax
from torch.nn import functional as F

import jaxtrain
from jaxtrain import optim
from jaxtrain.interop import NameTable, TorchParam
from parity import stages as stagewise
from parity.case import Case
from parity.cases import gpt2
from parity.conventions.clipping import CLIPPING
from parity.conventions.operations import (
    CONVOLUTIONS,
    CROSS,
    EPSILONS,
    LOSSES,
    NORMS,
    OPERATIONS,
    POOLS,
    OperationConvention,
)
from parity.conventions.optimizers import DIRECTIONS, OPTIMIZERS, recipes
from parity.diagnose import Diagnosis, diagnose
from parity.locate import locate
from parity.optimizer import Optimizer
from parity.stages import run_stages, stages
from tests.parity.test_locate import convolved, transformer

SLOW = pytest.mark.slow
SHAPE = (3, 6, 6)
ROWS = 4
IGNORED = -100
SGD = Optimizer("SGD", partial(torch.optim.SGD, lr=0.1), optim.sgd(0.1))


class Scaled(torch.nn.Module):
    """A function of the elementwise product of the input and `w`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(torch.rand(SHAPE) + 0.5)

    def forward(self, batch: Any) -> Any:
        return self.function(batch["x"] * self.w, batch["label"])


def case(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    optimizer: Any = SGD,
    clip_norm: float | None = None,
) -> Case:
    """Return a case that trains w on a weighted sum of the outputs of the functions of (x·w, labels)."""

    def batch(seed: int, rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        label = rng.integers(3, size=(rows, *SHAPE[1:]))
        return {"x": rng.standard_normal((rows, *SHAPE), np.float32), "label": np.where(label == 2, IGNORED, label + 1)}

    def torch_loss(model: Any, batch: Any) -> Any:
        out = model(batch)
        return (out * torch.from_numpy(weights(out.shape))).sum(), ROWS

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            out = ours(batch["x"] * params["w"], batch["label"])
            return jaxtrain.Loss((out * weights(out.shape)).sum(), weight=ROWS), {}

    return Case(
        name="tiny",
        torch_model=lambda: Scaled(theirs),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like={"w": jax.ShapeDtypeStruct(SHAPE, np.float32)},
        names=NameTable({"w": TorchParam("w")}),
        batch=batch,
        rows=ROWS,
        optimizer=optimizer,
        clip_norm=clip_norm,
    )


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(math.prod(shape), dtype=np.float64)).reshape(shape)


def diagnosed(case: Case, steps: int = 2) -> Diagnosis | None:
    return diagnose(run_stages(case, steps=steps))


# JAX's computations, with PyTorch's conventions or others


def normed(x: Any, axes: Any, eps: float, ddof: int = 0, mean: bool = True) -> Any:
    centred = x - x.mean(axes, keepdims=True) if mean else x
    n = math.prod(x.shape[axis] for axis in axes)
    return centred / jnp.sqrt((centred**2).sum(axes, keepdims=True) / (n - ddof) + eps)


def conv(x: Any, padding: Any, stride: int, flip: bool = False) -> Any:
    n = x.ndim - 2
    kernel = weights((2, x.shape[1], *[3] * n))
    kernel = kernel[(..., *[slice(None, None, -1)] * n)] if flip else kernel
    return lax.conv_general_dilated(x, kernel, (stride,) * n, padding)


def transposed(x: Any) -> Any:
    n = x.ndim - 2
    spatial = "XY"[:n]
    kernel = weights((x.shape[1], 2, *[3] * n))
    return lax.conv_transpose(
        x, kernel, (2,) * n, "VALID", dimension_numbers=(f"NC{spatial}", f"IO{spatial}", f"NC{spatial}")
    )


def pool(x: Any, padding: Any, stride: int, *, largest: bool, counted: bool = True) -> Any:
    n = x.ndim - 2
    window, strides = (1, 1, *[3] * n), (1, 1, *[stride] * n)
    pads = padding if isinstance(padding, str) else [(0, 0), (0, 0), *[(padding, padding)] * n]
    if largest:
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads)
    total = lax.reduce_window(x, 0.0, lax.add, window, strides, pads)
    return total / (3**n if counted else lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, window, strides, pads))


def cross(x: Any, label: Any, of: str, reduce: str = "kept", ignore: bool = True, **other: Any) -> Any:
    logp = jax.nn.log_softmax(x, 1)
    kept = (label != IGNORED) if ignore else jnp.ones_like(label, bool)
    label = jnp.where(label == IGNORED, 0, label)
    smooth = other.get("smoothing", 0.0)
    weight = jnp.asarray(other.get("class_weight", np.ones(3)))
    each = -(1 - smooth) * jnp.take_along_axis(logp, label[:, None], 1)[:, 0] * weight[label]
    each = jnp.where(kept, each - smooth / 3 * (logp * weight[None, :, None, None]).sum(1), 0.0)
    return {
        "kept": lambda: each.sum() / jnp.where(kept, weight[label], 0).sum(),
        "sum": each.sum,
        "all": each.mean,
    }[reduce]()


def theirs_cross(of: str, x: Any, label: Any, **other: Any) -> Any:
    given = {"ignore_index": IGNORED, **other}
    return (
        F.cross_entropy(x, label, **given) if of == "cross_entropy" else F.nll_loss(F.log_softmax(x, 1), label, **given)
    )


def pair(of: str, x: Any, framework: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a loss."""
    softmax = torch.softmax if framework is torch else jax.nn.softmax
    other = framework.roll(x, 1, -1)
    if of == "kl_div":
        return framework.log(softmax(x, -1)), softmax(other, -1)
    return (x, framework.sin(other) ** 2) if "binary" in of else (x, other)


def elements(of: str, x: Any, pos: float = 1.0) -> Any:
    x, y = pair(of, x, jnp)
    d = jnp.abs(x - y)
    huber = jnp.where(d < 0.5, 0.5 * d**2, 0.5 * (d - 0.25))
    return {
        "mse_loss": lambda: d**2,
        "l1_loss": lambda: d,
        "smooth_l1_loss": lambda: huber / 0.5,
        "huber_loss": lambda: huber,
        "binary_cross_entropy_with_logits": lambda: pos * y * jax.nn.softplus(-x) + (1 - y) * jax.nn.softplus(x),
        "kl_div": lambda: y * (jnp.log(y) - x),
    }[of]()


BETA = {"smooth_l1_loss": {"beta": 0.5}, "huber_loss": {"delta": 0.5}}


def loss(of: str, x: Any, **other: Any) -> Any:
    return getattr(F, of)(*pair(of, x, torch), **BETA.get(of, {}), **other)


def attend(x: Any, *, scale: float = 6**-0.5, axis: int = -1, mask: Any = None) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", x, jnp.roll(x, 1, -1)) * scale
    return jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -jnp.inf), axis) @ (x * x)


def theirs_attend(x: Any, **other: Any) -> Any:
    return F.scaled_dot_product_attention(x, torch.roll(x, 1, -1), x * x, **other)


def resize(x: Any, size: int, method: str, antialias: bool = False) -> Any:
    return jax.image.resize(x, (*x.shape[:2], size, size), method, antialias=antialias)


def corners(x: Any, size: int) -> Any:
    at = np.linspace(0, x.shape[-1] - 1, size)
    matrix = np.maximum(0, 1 - np.abs(at[None] - np.arange(x.shape[-1])[:, None]))
    return jnp.einsum("bcij,ik,jl->bckl", x, matrix, matrix)


def at_zero(x: Any, stopped: Any, f: Callable[[Any], Any], start: float = 0.0) -> Any:
    return f(x - stopped(x) + start) + x


def kink(f: Callable[[Any], Any], start: float = 0.0) -> Callable[..., Any]:
    """Return a function that evaluates `f` of PyTorch or JAX at its kink."""
    return lambda x, _: at_zero(x, lax.stop_gradient if isinstance(x, jax.Array) else torch.detach, f, start)


SMALL = 1e-2
NORM: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    "layer_norm": (lambda x, eps: F.layer_norm(x, (6,), eps=eps), (3,), True),
    "group_norm": (lambda x, eps: F.group_norm(x, 1, eps=eps), (1, 2, 3), True),
    "batch_norm": (lambda x, eps: F.batch_norm(x, None, None, training=True, eps=eps), (0, 2, 3), True),
    "instance_norm": (lambda x, eps: F.instance_norm(x, eps=eps), (2, 3), True),
    "rms_norm": (lambda x, eps: F.rms_norm(x, (6,), eps=eps), (3,), False),
}
FLAT = {"1d": (ROWS, 3, 36), "2d": (ROWS, 3, 6, 6), "3d": (ROWS, 1, 3, 6, 6)}
TRIL = np.tril(np.ones((6, 6), bool))
NEXT = np.tril(np.ones((6, 6), bool), 1)


def filtered(of: str, **other: Any) -> Callable[..., Any]:
    """Return PyTorch's convolution or pooling with windows of 3."""

    def theirs(x: Any, _: Any) -> Any:
        x, n = x.reshape(FLAT[of[-2:]]), int(of[-2])
        if "pool" in of:
            return getattr(F, of)(x, 3, **{"padding": 1, **other})
        shape = (x.shape[1], 2, *[3] * n) if "transpose" in of else (2, x.shape[1], *[3] * n)
        given = {"stride": 2} if "transpose" in of else {"stride": 2, "padding": 1, **other}
        return getattr(F, of)(x, torch.from_numpy(weights(shape)), **given)

    return theirs


def flat(of: str, f: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, _: f(x.reshape(FLAT[of[-2:]]))


def alone(f: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, _: f(x)


def planted() -> dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return the computations of PyTorch and JAX by function and JAX's convention."""
    found: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
    for of in NORMS:
        f, axes, mean = NORM[of]
        for eps in EPSILONS:
            found[of, f"eps is {eps:.3g}"] = (
                lambda x, _, f=f: f(SMALL * x, 1e-4),
                lambda x, _, axes=axes, eps=eps, mean=mean: normed(SMALL * x, axes, eps, mean=mean),
            )
        found[of, "variance is unbiased"] = (
            lambda x, _, f=f: f(SMALL * x, 1e-4),
            lambda x, _, axes=axes, mean=mean: normed(SMALL * x, axes, 1e-4, 1, mean),
        )
    affine = np.arange(1.0, 7.0), np.arange(6.0)
    found["layer_norm", "subtracts no mean (RMSNorm)"] = (
        alone(lambda x: F.layer_norm(x, (6,), *map(torch.from_numpy, affine))),
        alone(lambda x: normed(x, (3,), 1e-5, mean=False) * affine[0] + affine[1]),
    )
    gelu = F.gelu, partial(F.gelu, approximate="tanh")
    found["gelu", "is the tanh approximation"] = alone(gelu[0]), alone(jax.nn.gelu)
    found["gelu", "is exact"] = alone(gelu[1]), alone(partial(jax.nn.gelu, approximate=False))
    found["gelu", "is x·sigmoid(1.702x)"] = alone(gelu[0]), alone(lambda x: x * jax.nn.sigmoid(1.702 * x))
    for of in ("softmax", "log_softmax"):
        for axis in (-1, 0, 1, 2):
            right = 1 if axis == -1 else -1
            ours = getattr(jax.nn, of)
            found[of, f"runs over axis {axis}"] = (
                alone(partial(getattr(torch, of), dim=right)),
                alone(partial(ours, axis=axis)),
            )
    for of in CONVOLUTIONS:
        found[of, "padding is SAME"] = filtered(of), flat(of, lambda x: conv(x, "SAME", 2))
        found[of, "padding is 0"] = filtered(of), flat(of, lambda x: conv(x, "VALID", 2))
        found[of, "kernel is mirrored"] = (
            filtered(of),
            flat(of, lambda x: conv(x, [(1, 1)] * (x.ndim - 2), 2, flip=True)),
        )
    for of in ("conv_transpose1d", "conv_transpose2d"):
        found[of, "kernel is mirrored"] = filtered(of), flat(of, transposed)
    for of in POOLS:
        ours = partial(pool, largest=of.startswith("max"))
        found[of, "padding is SAME"] = filtered(of, stride=2), flat(of, partial(ours, padding="SAME", stride=2))
        found[of, "padding is 0"] = filtered(of, stride=2), flat(of, partial(ours, padding=0, stride=2))
        found[of, "stride is 1"] = filtered(of), flat(of, partial(ours, padding=1, stride=1))
        for counted in (True, False) if of.startswith("avg") else ():
            found[of, f"count_include_pad is {counted}"] = (
                filtered(of, count_include_pad=not counted),
                flat(of, partial(ours, padding=1, stride=3, counted=counted)),
            )
    up = partial(F.interpolate, size=(9, 9))
    down = partial(F.interpolate, size=(4, 4))
    found["interpolate", "antialiasing is on"] = (
        alone(partial(down, mode="bilinear")),
        alone(partial(resize, size=4, method="linear", antialias=True)),
    )
    found["interpolate", "antialiasing is off"] = (
        alone(partial(down, mode="bilinear", antialias=True)),
        alone(partial(resize, size=4, method="linear")),
    )
    cubic = alone(partial(down, mode="bicubic")), alone(partial(resize, size=4, method="cubic"))
    found["interpolate", "cubic has a=-0.5"] = cubic
    nearest = alone(partial(down, mode="nearest")), alone(partial(resize, size=4, method="nearest"))
    found["interpolate", "nearest is of half pixels"] = nearest
    found["interpolate", "align_corners is False"] = (
        alone(partial(up, mode="bilinear", align_corners=True)),
        alone(partial(resize, size=9, method="linear")),
    )
    found["interpolate", "align_corners is True"] = (
        alone(partial(up, mode="bilinear")),
        alone(partial(corners, size=9)),
    )
    for of in ("var", "std"):
        found[of, "divisor is the other: n, or n - 1"] = (
            alone(lambda x, of=of: getattr(x, of)(-1)),
            alone(lambda x, of=of: getattr(x, of)(-1)),
        )
    classes = np.array([1.0, 2.0, 3.0])
    found["cross_entropy", "label_smoothing is 0"] = (
        lambda x, label: theirs_cross("cross_entropy", x, label, label_smoothing=0.1),
        lambda x, label: cross(x, label, ""),
    )
    for of in CROSS:
        theirs = partial(theirs_cross, of)
        found[of, "classes weigh alike"] = (
            partial(theirs, weight=torch.from_numpy(classes)),
            lambda x, label, of=of: cross(x, label, of),
        )
        for has, other in {
            "ignored labels count, as class 0": {"ignore": False},
            "mean is over ignored labels too": {"reduce": "all"},
            "reduction is the sum": {"reduce": "sum"},
        }.items():
            found[of, has] = theirs, lambda x, label, of=of, other=other: cross(x, label, of, **other)
        found[of, "reduction is the mean"] = partial(theirs, reduction="sum"), partial(cross, of=of)
    for of in LOSSES:
        found[of, "reduction is the sum"] = alone(partial(loss, of)), alone(lambda x, of=of: elements(of, x).sum())
        found[of, "reduction is the mean"] = (
            alone(partial(loss, of, reduction="sum")),
            alone(lambda x, of=of: elements(of, x).mean()),
        )
    kl = partial(elements, "kl_div")
    found["kl_div", "reduction is the mean"] = (
        alone(partial(loss, "kl_div", reduction="batchmean")),
        alone(lambda x: kl(x).mean()),
    )
    found["kl_div", "divides by rows only"] = (
        alone(partial(loss, "kl_div", reduction="mean")),
        alone(lambda x: kl(x).sum() / ROWS),
    )
    found["mse_loss", "is halved (optax.l2_loss)"] = (
        alone(partial(loss, "mse_loss")),
        alone(lambda x: optax.l2_loss(*pair("", x, jnp)).mean()),
    )
    found["smooth_l1_loss", "is Huber's, not divided by beta"] = (
        alone(partial(loss, "smooth_l1_loss")),
        alone(lambda x: optax.huber_loss(*pair("", x, jnp), delta=0.5).mean()),
    )
    found["huber_loss", "is divided by delta (smooth L1)"] = (
        alone(partial(loss, "huber_loss")),
        alone(lambda x: elements("smooth_l1_loss", x).mean()),
    )
    bce = "binary_cross_entropy_with_logits"
    found[bce, "has no pos_weight"] = (
        alone(lambda x: loss(bce, x, pos_weight=torch.tensor(3.0, dtype=x.dtype))),
        alone(lambda x: elements(bce, x).mean()),
    )
    attention = "scaled_dot_product_attention"
    causal = alone(partial(theirs_attend, is_causal=True))
    for has, other in {
        "scores are not scaled": {"scale": 1.0, "mask": TRIL},
        "scores are divided by the width": {"scale": 1 / 6, "mask": TRIL},
        "has no mask": {},
        "mask shows the next position too": {"mask": NEXT},
    }.items():
        found[attention, has] = causal, alone(lambda x, other=other: attend(x, **other))
    shown = torch.from_numpy(TRIL.copy())
    shown[-1, -1] = False  # so that every query of the inverted mask attends to a key
    found[attention, "attends to what is masked"] = (
        alone(lambda x: theirs_attend(x, attn_mask=shown)),
        alone(lambda x: attend(x, mask=~shown.numpy())),
    )
    for axis, name in ((-2, "queries"), (-3, "heads")):
        found[attention, f"softmax runs over the {name}"] = (
            alone(theirs_attend),
            alone(lambda x, axis=axis: attend(x, axis=axis)),
        )
    index = np.arange(18)
    found["embedding", "padding_idx has a gradient"] = (
        alone(lambda x: F.embedding(torch.from_numpy(index), x[0].reshape(18, 6), padding_idx=3)),
        alone(lambda x: x[0].reshape(18, 6)[index]),
    )
    found["abs", "slope at 0 is 1"] = kink(torch.abs), kink(jnp.abs)
    found["clamp", "slope at its bounds is 1/2"] = (
        kink(lambda x: torch.clamp(x, min=0)),
        kink(lambda x: jnp.clip(x, 0.0, None)),
    )
    for of, ours in (("max", jnp.max), ("min", jnp.min)):
        found[of, "ties share it"] = (
            alone(lambda x, of=of: getattr(torch, of)(torch.cat([x, x.detach()], -1), -1)[0]),
            alone(lambda x, ours=ours: ours(jnp.concatenate([x, lax.stop_gradient(x)], -1), -1)),
        )
    found["relu", "slope at 0 is 1/2"] = kink(F.relu), kink(lambda x: jnp.maximum(x, 0.0))
    found["leaky_relu", "slope at 0 is 1"] = kink(F.leaky_relu), kink(jax.nn.leaky_relu)
    found["hardtanh", "slope at its bounds is 1"] = kink(F.hardtanh, 1.0), kink(jax.nn.hard_tanh, 1.0)
    return {key: functions for key, functions in found.items() if key in {(c.of, c.has) for c in OPERATIONS}}


OF_BATCH_NORM = {
    "statistics are the running ones",
    "momentum is the old value's weight",
    "running variance is biased",
}
"""Conventions that need a case with buffers."""


def test_every_convention_of_operations_is_tested() -> None:
    rows = {(c.of, c.has) for c in OPERATIONS}
    assert len(rows) == len(OPERATIONS)
    assert rows - planted().keys() == {("batch_norm", has) for has in OF_BATCH_NORM}


def representatives(pairs: Iterable[tuple[str, str]]) -> Iterator[Any]:
    """Yield every pair, as slow if previous pairs cover both its function and, up to numbers, its convention."""
    subjects: set[str] = set()
    conventions: set[str] = set()
    for of, has in pairs:
        kind = re.sub(r"[-+.e\d]*\d", "n", has)
        repeats = of in subjects and kind in conventions
        subjects.add(of)
        conventions.add(kind)
        yield pytest.param(of, has, marks=[SLOW] if repeats else [])


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("of", "has"), [*representatives(planted())])
def test_a_convention_of_an_operation_is_diagnosed(of: str, has: str) -> None:
    theirs, ours = planted()[of, has]
    found = diagnosed(case(theirs, ours), steps=1)
    assert found is not None
    assert (found.subject, found.has) == (of, has)
    assert found.before > 1e-10 >= found.after


def batch_normed(bug: str) -> Case:
    """Return `case` for a batch norm with its buffers."""

    def loss_fn(params: Any, batch: Any, rng: Any, state: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            x = batch["x"] * params["w"]
            mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3)), ROWS * 36
            old = bug == "momentum is the old value's weight"
            new = 0.9 if old else 0.1
            kept = var if bug == "running variance is biased" else var * n / (n - 1)
            after = {
                "mean": (1 - new) * state["mean"] + new * mean,
                "var": (1 - new) * state["var"] + new * kept,
                "count": state["count"] + 1,
            }
            if bug == "statistics are the running ones":
                mean, var = state["mean"], state["var"]
            out = (x - mean[:, None, None]) / jnp.sqrt(var[:, None, None] + 1e-5)
            return jaxtrain.Loss((out * weights(out.shape)).sum(), weight=ROWS), {}, after

    names = {"mean": "function.running_mean", "var": "function.running_var", "count": "function.num_batches_tracked"}
    shapes = {"mean": (3,), "var": (3,), "count": ()}

    class Normed(Scaled):
        def forward(self, batch: Any) -> Any:
            return self.function(batch["x"] * self.w)

    return dataclasses.replace(
        case(abs, abs),
        torch_model=lambda: Normed(torch.nn.BatchNorm2d(3, affine=False)),
        loss_fn=loss_fn,
        state_like={k: jax.ShapeDtypeStruct(s, np.int32 if k == "count" else np.float32) for k, s in shapes.items()},
        buffers=NameTable({k: TorchParam(name) for k, name in names.items()}),
    )


@pytest.mark.parametrize("bug", ["", *sorted(OF_BATCH_NORM)])
def test_a_convention_of_running_statistics_is_diagnosed(bug: str) -> None:
    found = diagnosed(batch_normed(bug))
    assert (found and found.has) == (bug or None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "bug", "has"),
    [
        pytest.param(transformer, "biased variance", "layer_norm: JAX's variance is unbiased", marks=SLOW),
        (transformer, "epsilon", "layer_norm: JAX's eps is 1e-6: epsilon=1e-5"),
        pytest.param(transformer, "scale", "scaled_dot_product_attention: JAX's scores are not scaled", marks=SLOW),
        (transformer, "mask", "scaled_dot_product_attention: JAX's mask shows the next position too"),
        pytest.param(transformer, "softmax axis", None, marks=SLOW),  # positions masked in every head are NaN
        (transformer, "gelu", "gelu: JAX's is exact: approximate=True"),
        pytest.param(transformer, "loss axis", None, marks=SLOW),
        pytest.param(transformer, "residual", None, marks=SLOW),
        pytest.param(transformer, "wrong backward", None, marks=SLOW),
        pytest.param(transformer, "stopped gradient", None, marks=SLOW),
        pytest.param(convolved, "unbiased", "batch_norm: JAX's variance is unbiased", marks=SLOW),
        (convolved, "running variance", "batch_norm: JAX's running variance is biased"),
        (convolved, "padding", None),
        (convolved, "leaky", None),
        (convolved, "flatten order", None),
        pytest.param(convolved, "", None, marks=SLOW),
    ],
)
def test_one_layer_of_a_model_is_diagnosed_where_it_is_located(model: Any, bug: str, has: str | None) -> None:
    planted = model(bug)
    found = diagnose(run_stages(planted, steps=2), locate(planted))
    assert found is None if has is None else str(found).startswith(has)


@pytest.mark.slow
@SLOW
def test_a_convention_of_every_layer_is_diagnosed() -> None:
    planted = gpt2.case(dataclasses.replace(gpt2.CONFIG, layer_norm_epsilon=1e-6))
    found = diagnose(run_stages(planted, steps=1), locate(planted))
    assert str(found).startswith("layer_norm: JAX's eps is 1e-6: epsilon=1e-5 (")


@pytest.mark.slow
def test_diagnosis_uses_the_micro_batches_and_dropout_of_the_check() -> None:
    planted = gpt2.case(dataclasses.replace(gpt2.CONFIG, layer_norm_epsilon=1e-6), dropout=0.1)
    found = diagnose(run_stages(planted, steps=2, accumulate=2, seed=5))
    assert (found and found.has) == "eps is 1e-06"


# Clipping


@pytest.mark.sampled(1)
@pytest.mark.parametrize("convention", CLIPPING, ids=lambda c: c.has)
def test_a_convention_of_clipping_is_diagnosed(convention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over = convention.has == "factor may be over 1"
    tiny = two_leaves(clip_norm=1e4 if over else 2.0)
    monkeypatch.setattr(stagewise, "clip_grad_norm", lambda grads, bound: (convention.clipped(grads, bound), None))
    found = diagnosed(tiny)
    assert (found and found.has) == convention.has


def test_an_unknown_clipping_has_no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagewise, "clip_grad_norm", lambda grads, bound: (jax.tree.map(jnp.tanh, grads), None))
    assert diagnosed(two_leaves(clip_norm=2.0)) is None


# Optimizers


class Leaves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(5) + 0.5)
        self.b = torch.nn.Parameter(torch.rand(5))


def two_leaves(optimizer: Any = SGD, clip_norm: float | None = None) -> Case:
    """A small regression."""

    def loss_of(w: Any, b: Any, x: Any) -> Any:
        return ((w * x + b) ** 2 * x).sum()

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return jaxtrain.Loss(loss_of(params["w"], params["b"], batch["x"]), weight=ROWS), {}

    return Case(
        name="leaves",
        torch_model=Leaves,
        torch_loss=lambda model, batch: (loss_of(model.w, model.b, batch["x"]), ROWS),
        loss_fn=loss_fn,
        params_like={name: jax.ShapeDtypeStruct((5,), np.float32) for name in "wb"},
        names=NameTable({name: TorchParam(name) for name in "wb"}),
        batch=lambda seed, rows: {"x": np.random.default_rng(seed).standard_normal((rows, 5), np.float32)},
        rows=ROWS,
        optimizer=optimizer,
        clip_norm=clip_norm,
    )


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


T = torch.optim
THEIRS: dict[str, Callable[..., Any]] = {
    "Adadelta": partial(T.Adadelta, rho=0.8, eps=1e-3, lr=0.1),
    "Adagrad": partial(T.Adagrad, lr=0.1, lr_decay=0.1, eps=1e-3, weight_decay=0.2),
    "Adam": partial(T.Adam, lr=0.1, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2, amsgrad=True, maximize=True),
    "AdamW": partial(T.AdamW, lr=0.1, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2),
    "Adamax": partial(T.Adamax, lr=0.1, betas=(0.7, 0.8), eps=1e-3),
    "NAdam": partial(T.NAdam, lr=0.1, betas=(0.7, 0.8), eps=1e-3),
    "RAdam": partial(T.RAdam, lr=0.1, betas=(0.7, 0.8), eps=1e-3),
    "RMSprop": partial(T.RMSprop, lr=0.1, alpha=0.8, eps=1e-3, momentum=0.7, centered=True),
    "Rprop": partial(T.Rprop, lr=0.1),
    "SGD": partial(T.SGD, lr=0.1, momentum=0.7, dampening=0.4, weight_decay=0.2),
}
NESTEROV = partial(T.SGD, lr=0.1, momentum=0.7, nesterov=True)
UNDAMPED = partial(T.SGD, lr=0.1, momentum=0.7)


def grouped(params: Any) -> Any:
    (_, w), (_, b) = params
    return T.AdamW([{"params": [("w", w)], "weight_decay": 0.3}, {"params": [("b", b)], "weight_decay": 0.0}], lr=0.1)


SPECIAL: dict[str, Callable[..., Any]] = {
    "momentum is not Nesterov's": NESTEROV,
    "buffer is an average (optax.ema)": UNDAMPED,
    "momentum is Nesterov's": UNDAMPED,
    "weight decay is the first group's in all": grouped,
}
"""PyTorch's optimizer for conventions without effect on the optimizer of that kind in `THEIRS`."""


def rows() -> list[tuple[str, str]]:
    return [(kind, c.has) for c in OPTIMIZERS for kind in (c.of or ("AdamW", "SGD"))]


def as_planted(theirs: Any, scheduler: Any, options: Any) -> Case:
    """Return a case whose JAX optimizer has other options than PyTorch's."""
    made = theirs(list(Leaves().named_parameters()))
    found = recipes(made, scheduler and scheduler(made), 12)
    named = {name: recipe.but(options, found[0][0].options) for recipe, names in found for name in names}
    ours = optax.partition({name: recipe.transformation() for name, recipe in named.items()}, {n: n for n in named})
    return two_leaves(Optimizer("planted", theirs, ours, scheduler=scheduler))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", DIRECTIONS)
def test_a_recipe_equals_pytorchs_optimizer(kind: str) -> None:
    scheduled = None if kind == "Rprop" else exponential
    for scheduler in (None, scheduled):
        tiny = as_planted(THEIRS[kind], scheduler, {})
        found = diagnosed(tiny)
        if kind == "NAdam":
            assert found is not None
            assert found.has == "product of momenta is exact"
            assert 1e-10 < found.before < 1e-7
        else:
            assert all(stage.holds for stage in stages(tiny))
            assert found is None


def has_effect(kind: str, has: str) -> bool:
    """Return whether the convention has an effect on PyTorch's optimizer of that kind."""
    return not (
        (has == "weight decay is decoupled" and kind == "AdamW")
        or (has == "weight decay is in the gradient" and kind == "SGD")
        or (has == "weight decay is the first group's in all" and kind == "SGD")
        or (has in ("gradient is descended",))
        or (has in ("maximum is of the corrected moments", "amsgrad is off") and kind == "AdamW")
        or (kind == "RMSprop" and has == "momentum is Nesterov's")
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "has"), [*representatives(row for row in rows() if has_effect(*row))])
def test_a_convention_of_an_optimizer_is_diagnosed(kind: str, has: str) -> None:
    (convention,) = (c for c in OPTIMIZERS if c.has == has and (not c.of or kind in c.of))
    theirs = SPECIAL.get(has, THEIRS[kind])
    found = diagnosed(as_planted(theirs, None if kind == "Rprop" else exponential, convention.options), steps=8)
    assert found is not None
    assert (found.subject, found.has) == (kind, has)


def test_descent_instead_of_ascent_is_diagnosed() -> None:
    found = diagnosed(as_planted(THEIRS["Adam"], None, {"maximize": False}), steps=5)
    assert found is not None
    assert found.has == "gradient is descended"


def rate(count: Any) -> Any:
    return 0.1 * 0.7**count


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("theirs", "scheduler", "ours", "has"),
    [
        (partial(T.Adam, lr=0.1, eps=1e-3), None, optax.adam(0.1, eps=0, eps_root=1e-3), "eps is inside the root"),
        (partial(T.AdamW, lr=0.1), None, optax.adamw(0.1), "weight_decay is 0.0001"),
        (
            partial(T.Adam, lr=0.1, weight_decay=0.1),
            None,
            optax.adamw(0.1, weight_decay=0.1),
            "weight decay is decoupled",
        ),
        (
            partial(T.Adam, lr=0.1, betas=(0.9, 0.5), amsgrad=True),
            None,
            optax.amsgrad(0.1, b2=0.5),
            "maximum is of the corrected moments",
        ),
        (partial(T.RMSprop, lr=0.1), None, optax.rmsprop(0.1), "eps is inside the root, its decay is 0.9"),
        (
            partial(T.RMSprop, lr=0.1, momentum=0.9),
            exponential,
            optax.rmsprop(rate, decay=0.99, momentum=0.9, eps_in_sqrt=False),
            "learning rate is inside the buffer",
        ),
        (
            partial(T.Adagrad, lr=0.1),
            None,
            optax.adagrad(0.1),
            "sums start at 0.1, its eps is inside the root, its eps is 1e-7",
        ),
        (partial(T.NAdam, lr=0.1), None, optax.nadam(0.1), "momentum has no schedule"),
        (partial(T.RAdam, lr=0.1, betas=(0.9, 0.9)), None, optax.radam(0.1, b2=0.9), "eps is added after"),
        (partial(T.Rprop, lr=0.1), None, optax.rprop(0.1), "first update does not move"),
        (
            partial(T.SGD, lr=0.1, momentum=0.9, dampening=0.9),
            None,
            optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1)),
            "first gradient is damped",
        ),
        (partial(T.SGD, lr=0.1), exponential, optax.sgd(lambda count: rate(count + 1)), "schedule is one update ahead"),
        (partial(T.SGD, lr=0.1), None, optax.sgd(0.11), None),
        (partial(T.AdamW, lr=0.1), None, optax.lion(0.1), None),
        (partial(T.ASGD, lr=0.1), None, optax.sgd(0.2), None),
    ],
)
def test_conventions_of_optaxs_optimizers_are_diagnosed(
    theirs: Any, scheduler: Any, ours: Any, has: str | None
) -> None:
    found = diagnosed(two_leaves(Optimizer("optax", theirs, ours, scheduler=scheduler)), steps=8)
    assert found is None if has is None else has in str(found)


def test_a_convention_that_pytorch_refuses_is_logged_and_a_bug_in_the_harness_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(error: Exception) -> Callable[..., Any]:
        def computes(*_: Any) -> Any:
            raise error

        return computes

    run = run_stages(case(alone(F.gelu), alone(jax.nn.gelu)), steps=1)
    conventions = "parity.conventions.operations.OPERATIONS"
    refused = OperationConvention("gelu", "refused", "", raising(IndexError("dimension out of range")))
    monkeypatch.setattr(conventions, (refused,))
    with caplog.at_level("INFO", "parity.diagnose"):
        assert diagnose(run) is None
    (line,) = caplog.messages
    assert line == "tiny: 1 conventions refused by PyTorch: ['gelu, refused: IndexError: dimension out of range']"
    monkeypatch.setattr(conventions, (OperationConvention("gelu", "buggy", "", raising(KeyError("a bug of ours"))),))
    with pytest.raises(KeyError, match="a bug of ours"):
        diagnose(run)


def test_a_correct_case_has_no_diagnosis() -> None:
    assert diagnosed(case(alone(F.gelu), alone(partial(jax.nn.gelu, approximate=False)))) is None


@pytest.mark.parametrize("factor", [1.1, 0.37, -1.0])
def test_an_unknown_fault_of_the_loss_has_no_diagnosis(factor: float) -> None:
    theirs = alone(lambda x: loss("mse_loss", F.layer_norm(x, (6,))))
    ours = alone(lambda x: factor * elements("mse_loss", normed(x, (3,), 1e-5)).mean())
    assert diagnosed(case(theirs, ours)) is None
