"""Long attention, computed block by block: every option of one layer of 256 tokens, and bugs of the computation."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxtrain.models.attention import attention, blockwise
from jaxtrain.models.attention.block_arrays import BlockArrays, Scores
from parity.mutate.mutant import Mutant, Patch
from tests.parity.mutants.network import layered, normal

TOKENS, HEADS, WIDTH = 256, 2, 4
WINDOW, CAP, RATE = 60, 2.0, 0.25
SEGMENTS = np.repeat(np.arange(3), (100, 70, 86))[None]


class Attention(nn.Module):
    """Attention of x [B, T, 8] to itself with every option."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS * TOKENS).view(1, HEADS, 1, TOKENS))
        self.sinks = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the heads [B, T, 8]."""
        q = x.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
        scores = CAP * torch.tanh(q @ q.transpose(2, 3) / CAP) + self.bias
        distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
        seen = (distance >= 0) & (distance < WINDOW) & (SEGMENTS.T == SEGMENTS)
        scores = scores.masked_fill(torch.from_numpy(~seen), -torch.inf)
        sinks = self.sinks.view(1, HEADS, 1, 1).expand(len(x), HEADS, TOKENS, 1)
        weights = F.dropout(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], RATE)
        return (weights @ q).transpose(1, 2).flatten(2)


def attention_with_dropout(p: Any, x: Any) -> Any:
    """JAX's `Attention`."""
    q = x.reshape(*x.shape[:2], HEADS, WIDTH)
    segments = jnp.asarray(SEGMENTS)
    options: dict[str, Any] = {"causal": True, "window": WINDOW, "softcap": CAP, "scale": 1.0, "dropout": RATE}
    arrays = {name: p[name] for name in ("bias", "sinks", "rng")}
    return attention(q, q, q, segments=(segments, segments), **arrays, **options).reshape(x.shape)


def case() -> Any:
    """Return the case of the layer."""
    return layered(Attention, attention_with_dropout, (TOKENS, HEADS * WIDTH), normal)


def both_passes(wrong: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Change the options and operands of the forward and of the backward pass."""
    forward, backward = blockwise.forward, blockwise.backward

    def wrong_forward(options: Any, q: Any, k: Any, v: Any, operands: Any, **blocks: Any) -> Any:
        options, operands = wrong(options, operands)
        return forward(options, q, k, v, operands, **blocks)

    def wrong_backward(options: Any, q: Any, k: Any, v: Any, operands: Any, *rest: Any, **blocks: Any) -> Any:
        options, operands = wrong(options, operands)
        return backward(options, q, k, v, operands, *rest, **blocks)

    return lambda: mock.patch.multiple(blockwise, forward=wrong_forward, backward=wrong_backward)


def without_the_sinks(options: Any, q: Any, k: Any, v: Any, operands: Any, **blocks: Any) -> Any:
    """The forward pass, whose sum lacks the exponentials of the sinks."""
    return _forward(options, q, k, v, operands._replace(sinks=None), **blocks)


def without_the_last_block(options: Any, q: Any, k: Any, v: Any, operands: Any, **blocks: Any) -> Any:
    """The forward pass, whose logarithms lack the last block of keys."""
    out, *_ = _forward(options, q, k, v, operands, **blocks)
    last = np.arange(k.shape[1]) >= k.shape[1] - blockwise.block_sizes(q, k)[1]
    hidden = operands._replace(k_segments=jnp.where(last, -1, operands.k_segments))
    return out, *_forward(options, q, k, v, hidden, **blocks)[1:]


def capped_with_the_bias(self: BlockArrays, at: Any, queries: Any, keys: Any) -> Scores:
    """The scores of a pair of blocks, whose soft cap bounds the sum with the bias."""
    options, self.options = self.options, self.options._replace(softcap=None)
    masked = _scores(self, at, queries, keys).masked
    self.options = options
    curve = jnp.tanh(masked / CAP)
    return Scores(jnp.where(jnp.isneginf(masked), masked, CAP * curve), 1 - curve * curve)


def without_the_slope(self: BlockArrays, at: Any, queries: Any, keys: Any) -> Scores:
    """The scores of a pair of blocks, whose soft cap has no derivative."""
    return Scores(_scores(self, at, queries, keys).masked, None)


_forward, _scores = blockwise.forward, BlockArrays.scores
BUGS: dict[str, Patch] = {
    "window-off-by-one": both_passes(lambda options, x: (options._replace(window=WINDOW - 1), x)),
    "segments-off-by-one": both_passes(
        lambda options, x: (options, x._replace(q_segments=jnp.roll(x.q_segments, 1, axis=1)))
    ),
    "dropout-mask-of-another-row": both_passes(lambda options, x: (options, x._replace(rng=x.rng[::-1]))),
    "sinks-not-in-the-sum": lambda: mock.patch.object(blockwise, "forward", without_the_sinks),
    "sum-without-the-last-block": lambda: mock.patch.object(blockwise, "forward", without_the_last_block),
    "soft-cap-after-the-bias": lambda: mock.patch.object(BlockArrays, "scores", capped_with_the_bias),
    "soft-cap-without-derivative": lambda: mock.patch.object(BlockArrays, "scores", without_the_slope),
}
MUTANTS = [
    Mutant(f"long-attention-{name}", case, case, patch=patch, settings={"steps": 1}) for name, patch in BUGS.items()
]
