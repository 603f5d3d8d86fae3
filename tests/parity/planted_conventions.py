"""PyTorch's functions beside JAX's counterparts that follow another convention."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax import lax
from torch.nn import functional as F

from parity.explain.conventions.torch_functions import CONVOLUTIONS, CROSS, EPSILONS, LOSSES, NORMS, OPERATIONS, POOLS
from tests.parity.diagnosed_cases import IGNORED, ROWS, weights


class Gelu(torch.nn.Module):
    """The tanh approximation with rounded constants."""

    def forward(self, x: Any) -> Any:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


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
    found["gelu", "is that of torch.nn.functional"] = alone(Gelu()), alone(jax.nn.gelu)
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
