"""Attention."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.models.attention import attention
from jaxtrain.torch_import.ops.table import op


def _drops(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> bool:
    return (args[4] if len(args) > 4 else dropout_p) > 0


@op("scaled_dot_product_attention.default", random=_drops)
def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Attention of [..., heads, tokens, width]; a query that may attend to no key gets 0.

    `window` is not PyTorch's: `jaxtrain.torch_import.rewrites.masks` recognizes it.
    """
    del enable_gqa  # implied by the numbers of heads
    lead = query.shape[:-3]
    q, k, v = (_batched(x) for x in (query, key, value))
    mask = bias = None
    if attn_mask is not None:
        wide = jnp.atleast_2d(attn_mask)
        if wide.dtype != jnp.bool_:
            wide = jnp.broadcast_to(wide, (*wide.shape[:-2], query.shape[-2], key.shape[-2]))
        wide = wide.reshape((1,) * (query.ndim - wide.ndim) + wide.shape) if wide.ndim < query.ndim else wide
        wide = _batched_mask(wide, lead)
        mask, bias = (wide, None) if wide.dtype == jnp.bool_ else _separated(wide)
    out = attention(
        *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)),
        mask=mask,
        bias=bias,
        causal=is_causal,
        window=window,
        scale=scale,
        dropout=dropout_p,
        rng=rng,
    )
    return jnp.swapaxes(out, 1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _batched(x: jax.Array) -> jax.Array:
    """Give [..., heads, tokens, width] exactly one batch axis."""
    x = x[None] if x.ndim == 2 else x
    return x.reshape(-1, *x.shape[-3:])


def _batched_mask(mask: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Give a mask [..., heads, T, S] exactly one batch axis, of size 1 where it is the same for all."""
    mask = mask[None] if mask.ndim == 2 else mask
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return jnp.broadcast_to(mask, (*lead, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])


def _separated(bias: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """Return the mask and the bias of a floating-point mask: where it is -inf, a query does not attend."""
    attended = ~jnp.isneginf(bias)
    return attended, jnp.where(attended, bias, 0)
