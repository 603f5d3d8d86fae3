"""cuDNN's fused attention (Dao 2023), which programs for CUDA call in bfloat16 and float16.

`jax.nn.dot_product_attention` asks the process, which may have no cuDNN. Its dropout has one seed for all steps, which
is why attention with dropout is not cuDNN's.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.formula import combined_mask, visible
from jaxtrain.program import internals

LOW = (jnp.bfloat16, jnp.float16)
MASKED = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""Bias of a masked score: its weight is 0, and no difference of two such scores overflows in cuDNN."""


def is_supported(options: Options, q: Any, k: Any, v: Any, operands: Operands) -> bool:
    """Return whether cuDNN has the kernel, forward and backward, for these shapes in bfloat16 or float16."""
    (_, t, _, width), s = q.shape, k.shape[1]
    even = t % 2 == s % 2 == 0  # what the backward pass of a bias needs
    fits = width % 8 == 0 and width <= 256 and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    whole = operands.bias is None or operands.bias.shape[2:] == (t, s)
    added = (operands.mask, operands.bias, operands.q_segments)
    others = (operands.sinks, operands.q_positions, operands.k_positions, operands.rng, options.softcap)
    plain = all(x is None for x in others)
    return plain and fits and whole and q.dtype != np.float64 and (even or all(x is None for x in added))


def is_on(capability: tuple[int, int], q: Any, operands: Operands) -> bool:
    """Return whether cuDNN has a supported kernel, forward and backward, on GPUs of a compute capability.

    On Blackwell (10 and 12) its backward pass computes heads of at most 128, as on Ampere.
    """
    if q.shape[-1] > 128:
        return capability[0] == 9
    return capability >= ((9, 0) if operands.bias is not None else (8, 0))


def forward(options: Options, q: Any, k: Any, v: Any, operands: Operands) -> tuple[Any, Any]:
    """Compute the output [B, T, N, H] and the statistics of the softmax, float32 [B, N, T, 1].

    A query whose keys are all masked has output 0 and no gradient, as in the formula; cuDNN would average all values.
    """
    arrays, settings = _arguments(options, q, k, operands)
    call = internals.fused_attention._dot_product_attention_fwd_p_wrapper
    out, statistics = call.bind(q, k, v, *arrays, **settings, is_training=True)
    return _where_attended(out, options, operands), statistics[..., None]


def backward(
    options: Options, q: Any, k: Any, v: Any, operands: Operands, out: Any, statistics: Any, cotangent: Any
) -> list[Any]:
    """Compute the gradients of q, k, v and of the bias if there is one."""
    arrays, settings = _arguments(options, q, k, operands)
    cotangent = _where_attended(cotangent, options, operands)
    call = internals.fused_attention._dot_product_attention_bwd_p_wrapper
    dq, dk, dv, *dbias = call.bind(q, k, v, *arrays, statistics[..., 0], out, cotangent, **settings)
    return [dq, dk, dv, *(sum_to(operands.bias.shape, x) for x in dbias)]  # type: ignore[union-attr]


def _arguments(options: Options, q: Any, k: Any, operands: Operands) -> tuple[list[Any], dict[str, Any]]:
    """Return JAX's arguments between q, k, v and the residuals: bias, lengths, offsets, pages; and its parameters."""
    module = internals.fused_attention
    unused, mask, window = jnp.zeros(0, q.dtype), _mask(operands), options.window
    if window is not None and (mask is not None or operands.bias is not None):
        # Before 9.10.2 cuDNN takes no array beside a window.
        inside, window = visible(q.shape[1], k.shape[1], window), None
        mask = inside if mask is None else mask & inside
    settings = {
        "scale": options.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (mask is not None or operands.bias is not None, operands.bias is not None),
        "mask_type": module.MaskType.CAUSAL if options.causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **internals.score_setting(),
    }
    return [_additive(q, k, mask, operands.bias), *[unused] * 6], settings


def _mask(operands: Operands) -> Any:
    return combined_mask(operands.mask, operands.q_segments, operands.k_segments)


def _additive(q: Any, k: Any, mask: Any, bias: Any) -> Any:
    """Return mask and bias as the one array [1 or B, 1 or N, T, S] that is added to the scores."""
    t, n, s = q.shape[1], q.shape[2], k.shape[1]
    if mask is None and bias is None:
        return jnp.zeros(0, q.dtype)
    rows, heads = np.broadcast_shapes(*(x.shape[:2] for x in (mask, bias) if x is not None))
    shape = rows, heads if bias is None else n, t, s
    added = jnp.broadcast_to(q.dtype.type(0) if bias is None else bias, shape)
    if mask is None:
        return added
    return jnp.where(jnp.broadcast_to(mask, shape), added, q.dtype.type(MASKED[q.dtype.name]))


def sum_to(shape: tuple[int, ...], x: Any) -> Any:
    """Return the sum of `x` over the axes along which an array of `shape` was repeated, in float32 at least."""
    axes = tuple(i for i, size in enumerate(shape) if size != x.shape[i])
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return wide.sum(axes, keepdims=True).astype(x.dtype) if axes else x


def _where_attended(x: Any, options: Options, operands: Operands) -> Any:
    """Return `x` [B, T, N, H], with 0 for the queries whose keys are all masked."""
    mask = _mask(operands)
    if mask is None:
        return x
    t, s = x.shape[1], mask.shape[3]
    mask = mask & visible(t, s, options.window) if options.causal and s > 1 else mask
    return jnp.where(mask.any(-1, keepdims=True).swapaxes(1, 2), x, 0)
