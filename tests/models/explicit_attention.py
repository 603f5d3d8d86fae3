"""Attention with all scores, written in PyTorch and differentiated by it, and query by query in NumPy."""

from typing import NamedTuple

import numpy as np
import torch


class Given(NamedTuple):
    """Arguments of attention, NumPy arrays or None; those of `jaxtrain.models.attention.attention`, except `keep`.

    Attributes:
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, V].
      bias: Broadcastable to [B, N, T, S].
      sinks: [N].
      mask: bool, broadcastable to [B, N, T, S].
      segments: Of queries int [1 or B, T] and of keys int [1 or B, S].
      positions: The same shapes; None for 0, 1, ....
      keep: The dropout mask, bool [B, N, T, S].
      causal: Whether later keys are hidden.
      window: Number of visible positions.
      softcap: Bound of the scores.
      scale: Factor of the scores.
      dropout: Rate.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    mask: np.ndarray | None = None
    segments: tuple[np.ndarray, np.ndarray] | None = None
    positions: tuple[np.ndarray, np.ndarray] | None = None
    keep: np.ndarray | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float = 1.0
    dropout: float = 0.0

    @property
    def trained(self):
        """The arrays that have gradients, by name."""
        return {name: x for name in ("q", "k", "v", "bias", "sinks") if (x := getattr(self, name)) is not None}

    def visible(self):
        """Return which keys each query attends to, bool [B, N, T, S]."""
        (b, t, n, _), s = self.q.shape, self.k.shape[1]
        seen = np.ones((b, n, t, s), bool)
        if self.mask is not None:
            seen &= self.mask
        if self.segments is not None:
            own, other = self.segments
            seen &= own[:, None, :, None] == other[:, None, None, :]
        if self.causal:
            own, other = self.positions or (np.arange(t)[None], np.arange(s)[None])
            distance = own[:, None, :, None] - other[:, None, None, :]
            seen &= (distance >= 0) & (distance < (np.inf if self.window is None else self.window))
        return seen


def eager(given, cotangent, dtype=torch.float64):
    """Return the output and all gradients, as the eager functions of `transformers` compute them in a dtype.

    Scores are products in that dtype, the softmax is in float32 at least, and a query without keys has output 0.
    """
    wide = torch.promote_types(dtype, torch.float32)
    tensors = {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in given.trained.items()}
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
    repeated = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
    scores = q @ k.transpose(2, 3) * given.scale
    if given.softcap is not None:
        scores = torch.tanh(scores / given.softcap) * given.softcap
    if given.bias is not None:
        scores = scores + tensors["bias"]
    seen = torch.tensor(given.visible())
    scores = scores.masked_fill(~seen, torch.finfo(dtype).min)
    if given.sinks is not None:
        scores = torch.cat([scores, tensors["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=wide).to(dtype)[..., : seen.shape[3]].masked_fill(~seen, 0)
    if given.keep is not None:
        weights = weights * torch.tensor(given.keep) / (1 - given.dropout)
    out = (weights @ v).transpose(1, 2)
    grads = torch.autograd.grad(out, [*tensors.values()], torch.tensor(cotangent, dtype=dtype))
    return {name: x.detach().double().numpy() for name, x in zip(("out", *tensors), (out, *grads), strict=True)}


def query_by_query(given):
    """Return the output alone, in float64: for every query the mean of the values of its keys, by their weights."""
    (b, t, n, _), keys_heads, seen = given.q.shape, given.k.shape[2], given.visible()
    bias = np.broadcast_to(0.0 if given.bias is None else given.bias, seen.shape)
    out = np.zeros((b, t, n, given.v.shape[3]))
    for row, head, query in np.ndindex(b, n, t):
        total = 0.0 if given.sinks is None else np.exp(given.sinks[head])
        for key in np.flatnonzero(seen[row, head, query]):
            of_head = row, key, head * keys_heads // n
            score = given.scale * np.dot(given.q[row, query, head], given.k[of_head])
            if given.softcap is not None:
                score = given.softcap * np.tanh(score / given.softcap)
            weight = np.exp(score + bias[row, head, query, key])
            total += weight
            if given.keep is None or given.keep[row, head, query, key]:
                out[row, query, head] += weight * given.v[of_head] / (1 - given.dropout)
        out[row, query, head] /= total or 1.0
    return out
