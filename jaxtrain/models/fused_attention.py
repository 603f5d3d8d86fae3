"""cuDNN's fused attention (Dao 2023) as two primitives, forward and backward, chosen when a program is lowered.

A program is traced without knowing what it will be compiled for. `jaxtrain.models.attention` therefore traces both this
attention, for CUDA, and its formula, for all other platforms. The lowering calls cuDNN if the target has compute
capability 8.0 or more (9.0 for heads wider than 128; a target that is unknown, as in an export, is taken to have 8.0),
and otherwise computes the formula, so that no program for an older GPU contains cuDNN's attention.

`jax.nn.dot_product_attention` asks the process, which may have no cuDNN, and differentiates the bias too. Its dropout
has one seed for all steps, which is why attention with dropout is not fused.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxtrain.transforms import jax_internals

LOW = (jnp.bfloat16, jnp.float16)
MASKED = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""Bias of a masked score: its weight is 0, and no difference of two such scores overflows in cuDNN."""

Formula = Callable[..., jax.Array]


class Options(NamedTuple):
    """Attention apart from its arrays.

    Attributes:
      causal: Whether query t attends to keys 0 … t only.
      scale: Factor of the scores.
      window: Number of keys up to its own that a causal query attends to; None for all.
      formula: The same attention of (q, k, v, mask), for targets without the kernel.
    """

    causal: bool
    scale: float
    window: int | None
    formula: Formula


def is_supported(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> bool:
    """Return whether cuDNN has the kernel, forward and backward, for these shapes in bfloat16 or float16."""
    (_, t, _, width), s = q.shape, k.shape[1]
    even = t % 2 == s % 2 == 0  # what the backward pass of a bias needs
    fits = width % 8 == 0 and width <= 256 and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    return fits and q.dtype != np.float64 and (mask is None or even)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_attention(options: Options, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Compute attention by the fused kernel.

    A query whose keys are all masked has output 0 and no gradient, as in the formula; cuDNN would average all values.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H], bfloat16 or float16.
      k: Keys [B, S, K, H].
      v: Values [B, S, K, H].
      mask: bool, of four axes broadcastable to [B, N, T, S], or None.

    Returns:
      [B, T, N, H].
    """
    return _forward(options, q, k, v, mask)[0]


def _forward(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    masks = () if mask is None else (mask,)
    out, statistics = FORWARD.bind(q, k, v, *masks, **options._asdict())
    return out, (q, k, v, mask, out, statistics)


def _backward(options: Options, residuals: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, mask, out, statistics = residuals
    masks = () if mask is None else (mask,)
    return (*BACKWARD.bind(q, k, v, *masks, out, statistics, cotangent, **options._asdict()), None)


fused_attention.defvjp(_forward, _backward)


def _formula_forward(q: Any, k: Any, v: Any, *masks: Any, formula: Formula, **options: Any) -> tuple[Any, Any]:
    del options
    b, t, n, _ = q.shape
    return formula(q, k, v, *(masks or (None,))), jnp.zeros((b, n, t, 1), np.float32)


def _formula_backward(q: Any, k: Any, v: Any, *rest: Any, formula: Formula, **options: Any) -> tuple[Any, ...]:
    """Differentiate the formula, which is computed again."""
    del options
    *masks, _, _, cotangent = rest
    _, vjp = jax.vjp(lambda q, k, v: formula(q, k, v, *(masks or [None])), q, k, v)
    gradients: tuple[Any, ...] = vjp(cotangent)
    return gradients


def _cudnn_forward(q: Any, k: Any, v: Any, *masks: Any, formula: Formula, **options: Any) -> tuple[Any, Any]:
    del formula
    arrays, settings = _cudnn_arguments(q, k, masks, **options)
    call = jax_internals.fused_attention._dot_product_attention_fwd_p_wrapper
    out, statistics = call.bind(q, k, v, *arrays, **settings, is_training=True)
    return _where_attended(out, masks, **options), statistics[..., None]


def _cudnn_backward(q: Any, k: Any, v: Any, *rest: Any, formula: Formula, **options: Any) -> tuple[Any, ...]:
    del formula
    *masks, out, statistics, cotangent = rest
    arrays, settings = _cudnn_arguments(q, k, masks, **options)
    cotangent = _where_attended(cotangent, masks, **options)
    call = jax_internals.fused_attention._dot_product_attention_bwd_p_wrapper
    return tuple(call.bind(q, k, v, *arrays, statistics[..., 0], out, cotangent, **settings))


def _cudnn_arguments(
    q: Any, k: Any, masks: Sequence[Any], *, causal: bool, scale: float, window: int | None
) -> tuple[list[Any], dict[str, Any]]:
    """Return JAX's arguments between q, k, v and the residuals: bias, lengths, offsets, pages; and its parameters."""
    module = jax_internals.fused_attention
    unused = jnp.zeros(0, q.dtype)
    bias = unused
    if masks:
        shape = (*masks[0].shape[:2], q.shape[1], k.shape[1])
        bias = jnp.where(jnp.broadcast_to(masks[0], shape), q.dtype.type(0), q.dtype.type(MASKED[q.dtype.name]))
    settings = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bool(masks), False),  # a bias, whose gradient is not computed
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **jax_internals.score_setting(),
    }
    return [bias, *[unused] * 6], settings


def _where_attended(x: Any, masks: Sequence[Any], *, causal: bool, scale: float, window: int | None) -> Any:
    """Return `x` [B, T, N, H], with 0 for the queries whose keys are all masked."""
    del scale
    if not masks:
        return x
    t, s = x.shape[1], masks[0].shape[3]
    mask = masks[0] & visible(t, s, window) if causal and s > 1 else masks[0]
    return jnp.where(mask.any(-1, keepdims=True).swapaxes(1, 2), x, 0)


def visible(t: int, s: int, window: int | None) -> np.ndarray:
    """Return bool [1, 1, T, S]: the keys that a causal query attends to.

    >>> visible(3, 3, 2)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    lower = np.tril(np.ones((1, 1, t, s), bool))
    return lower if window is None else np.triu(lower, 1 - window)


def _shapes_forward(q: Any, k: Any, v: Any, *masks: Any, **options: Any) -> list[Any]:
    del k, v, masks, options
    b, t, n, _ = q.shape
    return [q, q.update(shape=(b, n, t, 1), dtype=np.dtype(np.float32))]


def _shapes_backward(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> list[Any]:
    del rest, options
    return [q, k, v]


def _fold_batch(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    """Apply a primitive under `jax.vmap`, whose axis becomes part of the rows."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    first = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    rows = first[0].shape[1]
    folded = [jnp.broadcast_to(x, (size, rows, *x.shape[2:])).reshape(-1, *x.shape[2:]) for x in first]
    outs = primitive.bind(*folded, **options)
    return [y.reshape(size, rows, *y.shape[1:]) for y in outs], [0] * len(outs)


def _primitive(name: str, shapes: Callable[..., Any], cudnn: Callable[..., Any], formula: Callable[..., Any]) -> Any:
    def lower_on_cuda(ctx: Any, *args: Any, **options: Any) -> Any:
        q = ctx.avals_in[0]
        needed = (8, 0) if q.shape[-1] <= 128 else (9, 0)
        compute = cudnn if q.dtype in LOW and jax_internals.compute_capability(ctx) >= needed else formula
        return mlir.lower_fun(compute, multiple_results=True)(ctx, *args, **options)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(lambda *args, **options: formula(*args, **options))
    batching.primitive_batchers[primitive] = functools.partial(_fold_batch, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=True))
    mlir.register_lowering(primitive, lower_on_cuda, platform="cuda")
    jax_internals.needs_devices_when_lowered(primitive)
    return primitive


FORWARD = _primitive("fused_attention", _shapes_forward, _cudnn_forward, _formula_forward)
"""(q, k, v[, mask]) -> (out, statistics of the softmax, float32 [B, N, T, 1])."""

BACKWARD = _primitive("fused_attention_backward", _shapes_backward, _cudnn_backward, _formula_backward)
"""(q, k, v[, mask], out, statistics, cotangent) -> gradients of q, k and v."""
