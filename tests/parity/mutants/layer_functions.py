"""Layers in JAX, with the arguments that a mutant changes, and the layers of PyTorch that need a class."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, nn
from torch.nn import functional as F

from jaxtrain.passes import autocast_disabled
from tests.parity.mutants.network import Call

OIHW = ("NCHW", "OIHW", "NCHW")
Ours = Callable[..., Any]


def layer_norm(p: Any, x: Any, eps: float = 1e-5, ddof: int = 0, fast: bool = False, rms: bool = False) -> Any:
    """LayerNorm or RMSNorm, over the last axis."""
    mean = x.mean(-1, keepdims=True)
    # The mean of inputs far from zero is rounded; PyTorch's is exact to the last digit.
    mean = (mean + (x - mean).mean(-1, keepdims=True)) * (not rms)
    var = jnp.square(x - mean).sum(-1, keepdims=True) / (x.shape[-1] - ddof)
    if fast:
        var = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) - jnp.square(mean.astype(jnp.float32))
    return (x - mean) / jnp.sqrt(var + eps) * p["weight"] + p.get("bias", 0.0)


def batch_norm(
    p: Any,
    x: Any,
    state: Any,
    momentum: float = 0.1,
    eps: float = 1e-5,
    biased: bool = False,
    ddof: int = 0,
    frozen: bool = False,
) -> Any:
    """BatchNorm1d in training, with its new buffers."""
    mean, var = x.mean(0), x.var(0, ddof=ddof)
    statistics = {"mean": mean, "var": x.var(0, ddof=0 if biased else 1)}
    new = {"num_batches_tracked": state["num_batches_tracked"] + 1}
    for name, value in statistics.items():
        old = state[f"running_{name}"]
        new[f"running_{name}"] = old if frozen else (1 - momentum) * old + momentum * value
    return (x - mean) / jnp.sqrt(var + eps) * p["weight"] + p["bias"], new


def group_norm(p: Any, x: Any, eps: float = 1e-5, groups: int = 2) -> Any:
    """GroupNorm of [B, C, N]."""
    y = x.reshape(len(x), groups, -1)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + eps)
    return y.reshape(x.shape) * p["weight"][:, None] + p["bias"][:, None]


def conv(p: Any, x: Any, stride: int = 1, padding: Any = "VALID", flip: bool = False) -> Any:
    """Conv2d."""
    kernel = p["weight"][:, :, ::-1, ::-1] if flip else p["weight"]
    y = lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=OIHW)
    return y + p["bias"][:, None, None]


def conv_transpose(p: Any, x: Any, flip: bool = True) -> Any:
    """ConvTranspose2d of stride 2 and a kernel of 3."""
    kernel = p["weight"].transpose(1, 0, 2, 3)
    kernel = kernel[:, :, ::-1, ::-1] if flip else kernel
    y = lax.conv_general_dilated(x, kernel, (1, 1), [(2, 2)] * 2, lhs_dilation=(2, 2), dimension_numbers=OIHW)
    return y + p["bias"][:, None, None]


def max_pool(p: Any, x: Any, stride: int = 2) -> Any:
    """MaxPool2d(2)."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, stride, stride), "VALID")


def avg_pool(p: Any, x: Any, include: bool = True) -> Any:
    """AvgPool2d(2, padding=1)."""
    window = partial(
        lax.reduce_window,
        init_value=np.zeros((), x.dtype)[()],
        computation=lax.add,
        window_dimensions=(1, 1, 2, 2),
        window_strides=(1, 1, 2, 2),
        padding=[(0, 0), (0, 0), (1, 1), (1, 1)],
    )
    return window(x) / (4 if include else window(jnp.ones_like(x)))


def resized(p: Any, x: Any, method: str = "linear", antialias: bool = False) -> Any:
    """Resize to [B, C, 5, 5]; as PyTorch's, in float32 under autocast."""
    with autocast_disabled():
        return jax.image.resize(x, (*x.shape[:2], 5, 5), method, antialias=antialias)


def nearest(p: Any, x: Any, shift: float = 0.0) -> Any:
    """Resize to [B, C, 5, 5] by the pixel at or before each position."""
    at = np.floor((np.arange(5) + shift) * x.shape[-1] / 5).astype(np.int32)
    return x[:, :, at][:, :, :, at]


def bicubic(p: Any, x: Any, a: float = -0.75) -> Any:
    """Resize from 4 to 8 pixels along both axes; as PyTorch's, in float32 under autocast."""
    m = np.zeros((8, 4), np.float32)
    for i in range(8):
        at = (i + 0.5) / 2 - 0.5
        for j in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            t = abs(at - j)
            near = (a + 2) * t**3 - (a + 3) * t**2 + 1
            m[i, min(max(j, 0), 3)] += near if t <= 1 else a * (t**3 - 5 * t**2 + 8 * t - 4)
    with autocast_disabled():
        return jnp.einsum("ih,jw,bchw->bcij", m, m, x)


def lstm(p: Any, x: Any, forget: float = 0.0, summed: bool = True, order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """Return every hidden state over [B, T, D]."""
    h = c = jnp.zeros((len(x), 4), x.dtype)
    hs = []
    for t in range(x.shape[1]):
        z = x[:, t] @ p["weight_ih_l0"].T + p["bias_ih_l0"] + h @ p["weight_hh_l0"].T
        z = z + p["bias_hh_l0"] if summed else z + 0 * p["bias_hh_l0"]
        gates = jnp.split(z, 4, -1)
        i, f, g, o = (gates[j] for j in order)
        c = jax.nn.sigmoid(f + forget) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        hs.append(h := jax.nn.sigmoid(o) * jnp.tanh(c))
    return jnp.stack(hs, 1)


def gru(p: Any, x: Any, inside: bool = True, swapped: bool = False) -> Any:
    """Return every hidden state over [B, T, D]."""
    h = jnp.zeros((len(x), 4), x.dtype)
    hs = []
    b_hn = p["bias_hh_l0"][8:]
    for t in range(x.shape[1]):
        ir, iz, i_n = jnp.split(x[:, t] @ p["weight_ih_l0"].T + p["bias_ih_l0"], 3, -1)
        hr, hz, hn = jnp.split(h @ p["weight_hh_l0"].T, 3, -1)
        r = jax.nn.sigmoid(ir + hr + p["bias_hh_l0"][:4])
        z = jax.nn.sigmoid(iz + hz + p["bias_hh_l0"][4:8])
        n = jnp.tanh(i_n + r * (hn + b_hn)) if inside else jnp.tanh(i_n + r * hn + b_hn)
        hs.append(h := z * n + (1 - z) * h if swapped else (1 - z) * n + z * h)
    return jnp.stack(hs, 1)


def embedding(p: Any, x: Any, padding: bool = True) -> Any:
    """Embedding(3, 4, padding_idx=0)."""
    y = p["weight"][x]
    return jnp.where((x == 0)[..., None], lax.stop_gradient(y), y) if padding else y


MASK = np.eye(3, dtype=bool)
CAUSAL = np.tril(np.ones((3, 3), bool))


def attention(
    p: Any,
    x: Any,
    keep: Any = CAUSAL,
    scale: float = 0.5,
    axis: int = -1,
    empty: float = 0.0,
) -> Any:
    """Self-attention of [B, T, 4] with one head."""
    scores = jnp.einsum("bqd,bkd->bqk", x, x) * scale
    weights = jax.nn.softmax(jnp.where(keep, scores, -1e30), axis)
    weights = jnp.where(keep.any(1)[:, None], weights, empty)
    return weights @ x


def multihead(p: Any, x: Any, heads: int = 2, keep: np.ndarray = ~MASK) -> Any:
    """MultiheadAttention(4, 2), whose mask is True for ignored positions."""
    q, k, v = (
        y.reshape(*x.shape[:2], heads, -1) for y in jnp.split(x @ p["in_proj_weight"].T + p["in_proj_bias"], 3, -1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(4 // heads)
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), -1)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    return y @ p["out_proj.weight"].T + p["out_proj.bias"]


class Multihead(nn.MultiheadAttention):
    """Self-attention in which no position attends to itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the attended values."""
        return super().forward(x, x, x, attn_mask=torch.from_numpy(MASK), need_weights=False)[0]


class Lstm(nn.LSTM):
    """Returns every hidden state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return hidden states [B, T, H]."""
        return super().forward(x)[0]


class Gru(nn.GRU):
    """Returns every hidden state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return hidden states [B, T, H]."""
        return super().forward(x)[0]


class Residual(nn.Module):
    """A residual block with normalization first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        return x + self.fc(self.norm(x))


def residual(p: Any, x: Any, post: bool = False, stopped: bool = False, normed: bool = False) -> Any:
    """JAX's `Residual`."""
    norm = {"weight": p["norm.weight"], "bias": p["norm.bias"]}
    y = layer_norm(norm, x)
    skip = lax.stop_gradient(x) if stopped else y if normed else x
    if post:
        return layer_norm(norm, x + x @ p["fc.weight"].T + p["fc.bias"])
    return skip + y @ p["fc.weight"].T + p["fc.bias"]


def flattened(p: Any, x: Any, last: bool = False) -> Any:
    """Flatten and Linear of an image."""
    x = x.transpose(0, 2, 3, 1) if last else x
    return x.reshape(len(x), -1) @ p["1.weight"].T + p["1.bias"]


def dropout(p: Any, x: Any, keep: float = 0.75, scaled: bool = True, always: bool = False) -> Any:
    """Dropout(0.25)."""
    mask = jax.random.bernoulli(p["rng"], keep, x.shape)
    return jnp.where(mask, x / keep if scaled else x, x if always else 0.0)


def spread(p: Any, x: Any, ddof: int = 1, root: bool = False) -> Any:
    """The variance of each row."""
    var = x.var(-1, ddof=ddof)
    return jnp.sqrt(var) if root else var


def elementwise(function: Callable[[Any], Any]) -> Ours:
    """An activation."""
    return lambda p, x: function(x)


def causal(x: Tensor) -> Tensor:
    """PyTorch's attention of x to itself."""
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def resize(mode: str, size: int = 5, **options: Any) -> Callable[[], nn.Module]:
    """PyTorch's resizing."""
    return lambda: Call(lambda x: F.interpolate(x, (size, size), mode=mode, **options))
