"""Layers: normalization, convolution, pooling, resizing, activations, recurrence, attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from parity.mutate.mutant import Mutant
from tests.parity.mutants.layer_functions import (
    MASK,
    Gru,
    Lstm,
    Multihead,
    Ours,
    Residual,
    attention,
    avg_pool,
    batch_norm,
    bicubic,
    causal,
    conv,
    conv_transpose,
    dropout,
    elementwise,
    embedding,
    flattened,
    group_norm,
    gru,
    layer_norm,
    lstm,
    max_pool,
    multihead,
    nearest,
    residual,
    resize,
    resized,
    spread,
)
from tests.parity.mutants.network import Call, Draw, layered, normal


def small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw inputs that are small relative to an epsilon."""
    return normal(rng, shape) * np.float32(1e-3)


def far(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw inputs whose mean is large relative to their variance."""
    return normal(rng, shape) + 3000


def tokens(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw indices, many of them 0."""
    return rng.integers(3, size=shape)


def mutants(
    layer: Callable[[], nn.Module], right: Ours, shape: tuple[int, ...], draw: Draw = normal, **wrong: Ours
) -> list[Mutant]:
    """A mutant for each of the functions `wrong`, by name."""
    move = "" if draw is tokens else "scale"
    clean = partial(layered, layer, named(right), shape, draw, move)

    def mutant(name: str, ours: Ours) -> Mutant:
        return Mutant(
            name,
            partial(layered, layer, named(ours), shape, draw, move),
            clean,
            "buffers" if "running" in name or "momentum" in name else "forward|backward",
            "layer",
            None if "stopped" in name else ours,  # a missing computation has no line
        )

    return [mutant(name.replace("_", "-"), ours) for name, ours in wrong.items()]


def named(ours: Ours) -> Ours:
    """A partial function with the name of the function it calls."""
    return _renamed(ours) if isinstance(ours, partial) else ours


def _renamed(ours: "partial[Any]") -> Ours:
    def called(*args: Any) -> Any:
        return ours(*args)

    called.__name__ = ours.func.__name__
    return called


ROW_LESS = np.array([[True, True, False], [False, False, False], [True, True, True]])
MUTANTS = [
    *mutants(
        lambda: nn.LayerNorm(5),
        layer_norm,
        (5,),
        small,
        layer_norm_eps=partial(layer_norm, eps=1e-6),
        layer_norm_unbiased=partial(layer_norm, ddof=1),
        layer_norm_is_rms=partial(layer_norm, rms=True),
    ),
    *mutants(lambda: nn.LayerNorm(5), layer_norm, (5,), far, layer_norm_fast_variance=partial(layer_norm, fast=True)),
    *mutants(
        lambda: nn.RMSNorm(5, eps=1e-7),
        partial(layer_norm, rms=True, eps=1e-7),
        (5,),
        small,
        rms_norm_eps=partial(layer_norm, rms=True, eps=1e-6),
    ),
    *mutants(
        lambda: nn.BatchNorm1d(3),
        batch_norm,
        (3,),
        batch_norm_momentum_of_the_old=partial(batch_norm, momentum=0.9),
        batch_norm_momentum_flax=partial(batch_norm, momentum=0.01),
        batch_norm_running_variance_biased=partial(batch_norm, biased=True),
        batch_norm_running_frozen=partial(batch_norm, frozen=True),
        batch_norm_unbiased=partial(batch_norm, ddof=1),
        batch_norm_eps=partial(batch_norm, eps=1e-3),
    ),
    *mutants(
        lambda: nn.GroupNorm(2, 4),
        group_norm,
        (4, 3),
        small,
        group_norm_eps=partial(group_norm, eps=1e-6),
        group_norm_groups=partial(group_norm, groups=4),
    ),
    *mutants(lambda: Call(lambda x: x.var(-1, keepdim=True)), spread, (5,), var_ddof=partial(spread, ddof=0)),
    *mutants(
        lambda: Call(lambda x: x.std(-1, keepdim=True)),
        partial(spread, root=True),
        (5,),
        std_ddof=partial(spread, root=True, ddof=0),
    ),
    *mutants(
        lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2),
        partial(conv, stride=2, padding=[(1, 1)] * 2),
        (2, 4, 4),
        conv_same_is_asymmetric=partial(conv, stride=2, padding="SAME"),
        conv_is_a_convolution=partial(conv, stride=2, padding=[(1, 1)] * 2, flip=True),
    ),
    *mutants(lambda: nn.Conv2d(2, 3, 3), conv, (2, 4, 4), conv_padding_same=partial(conv, padding="SAME")),
    *mutants(
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
        conv_transpose,
        (2, 3, 3),
        conv_transpose_flip=partial(conv_transpose, flip=False),
    ),
    *mutants(lambda: nn.MaxPool2d(2), max_pool, (1, 4, 4), max_pool_stride=partial(max_pool, stride=1)),
    *mutants(
        lambda: nn.AvgPool2d(2, padding=1), avg_pool, (1, 4, 4), avg_pool_include_pad=partial(avg_pool, include=False)
    ),
    *mutants(
        resize("bilinear"), resized, (1, 9, 9), bilinear_antialias=partial(resized, method="linear", antialias=True)
    ),
    *mutants(resize("bicubic", 8), bicubic, (1, 4, 4), bicubic_a=partial(bicubic, a=-0.5)),
    *mutants(resize("nearest"), nearest, (1, 8, 8), nearest_half_pixel=partial(nearest, shift=0.5)),
    *mutants(
        nn.GELU,
        elementwise(partial(jax.nn.gelu, approximate=False)),
        (5,),
        gelu_tanh=lambda p, x: jax.nn.gelu(x, approximate=True),
    ),
    *mutants(
        lambda: nn.GELU("tanh"),
        elementwise(jax.nn.gelu),
        (5,),
        gelu_erf=lambda p, x: jax.nn.gelu(x, approximate=False),
    ),
    *mutants(
        lambda: nn.LeakyReLU(0.1),
        elementwise(partial(jax.nn.leaky_relu, negative_slope=0.1)),
        (5,),
        leaky_relu_slope=lambda p, x: jax.nn.leaky_relu(x, 0.01),
    ),
    *mutants(
        lambda: Lstm(3, 4, batch_first=True),
        lstm,
        (3, 3),
        lstm_forget_bias=partial(lstm, forget=1.0),
        lstm_one_bias=partial(lstm, summed=False),
        lstm_gate_order=partial(lstm, order=(0, 2, 1, 3)),
    ),
    *mutants(
        lambda: Gru(3, 4, batch_first=True),
        gru,
        (3, 3),
        gru_b_hn_outside=partial(gru, inside=False),
        gru_update_gate_swapped=partial(gru, swapped=True),
    ),
    *mutants(
        lambda: nn.Embedding(3, 4, padding_idx=0),
        embedding,
        (3,),
        tokens,
        embedding_padding_idx_trained=partial(embedding, padding=False),
    ),
    *mutants(
        lambda: Call(causal),
        attention,
        (3, 4),
        attention_scale_missing=partial(attention, scale=1.0),
        attention_causal_off_by_one=partial(attention, keep=np.tril(np.ones((3, 3), bool), 1)),
        attention_not_causal=partial(attention, keep=np.ones((3, 3), bool)),
        attention_softmax_axis=partial(attention, axis=1),
    ),
    *mutants(
        lambda: Call(lambda x: F.scaled_dot_product_attention(x, x, x, torch.from_numpy(ROW_LESS))),
        partial(attention, keep=ROW_LESS),
        (3, 4),
        attention_masked_row_is_uniform=partial(attention, keep=ROW_LESS, empty=1 / 3),
    ),
    *mutants(
        lambda: Multihead(4, 2, batch_first=True),
        multihead,
        (3, 4),
        multihead_mask_inverted=partial(multihead, keep=MASK),
        multihead_heads=partial(multihead, heads=1),
    ),
    *mutants(
        Residual,
        residual,
        (4,),
        residual_post_norm=partial(residual, post=True),
        residual_of_the_normed=partial(residual, normed=True),
        residual_gradient_stopped=partial(residual, stopped=True),
    ),
    *mutants(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)),
        flattened,
        (3, 2, 2),
        flatten_channels_last=partial(flattened, last=True),
    ),
    *mutants(
        lambda: nn.Dropout(0.25),
        dropout,
        (6,),
        dropout_rate=partial(dropout, keep=0.8),
        dropout_unscaled=partial(dropout, scaled=False),
        dropout_passes_the_dropped=partial(dropout, always=True),
    ),
]
