"""cuDNN's fused attention (Dao 2023) as two primitives, forward and backward, chosen when a program is lowered.

A program is traced without knowing what it will be compiled for. `jaxtrain.models.attention` therefore traces both this
attention, for CUDA, and its formula, for all other platforms. The lowering calls cuDNN if the target has compute
capability 8.0 or more (9.0 for heads wider than 128 and for a bias, whose gradient cuDNN computes from there on; a
target that is unknown, as in an export, is taken to have 8.0), and otherwise computes the formula, so that no program
for an older GPU contains cuDNN's attention.

`jax.nn.dot_product_attention` asks the process, which may have no cuDNN. Its dropout has one seed for all steps, which
is why attention with dropout is not fused.
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
      formula: The same attention of (q, k, v, mask, bias), for targets without the kernel.
    """

    causal: bool
    scale: float
    window: int | None
    formula: Formula


class Given(NamedTuple):
    """Which of the optional operands a primitive has, after q, k and v."""

    mask: bool
    bias: bool

    def split(self, operands: Sequence[Any]) -> tuple[Any, Any, Sequence[Any]]:
        """Return the mask and the bias, None for those that there are not, and the other operands."""
        mask = operands[0] if self.mask else None
        bias = operands[self.mask] if self.bias else None
        return mask, bias, operands[self.mask + self.bias :]


def present(*operands: Any) -> list[Any]:
    """Return the operands that are not None."""
    return [x for x in operands if x is not None]


def is_supported(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, bias: jax.Array | None) -> bool:
    """Return whether cuDNN has the kernel, forward and backward, for these shapes in bfloat16 or float16."""
    (_, t, _, width), s = q.shape, k.shape[1]
    even = t % 2 == s % 2 == 0  # what the backward pass of a bias needs
    fits = width % 8 == 0 and width <= 256 and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    whole = bias is None or bias.shape[2:] == (t, s)
    return fits and whole and q.dtype != np.float64 and (even or (mask is None and bias is None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_attention(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Compute attention by the fused kernel.

    A query whose keys are all masked has output 0 and no gradient, as in the formula; cuDNN would average all values.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H], bfloat16 or float16.
      k: Keys [B, S, K, H].
      v: Values [B, S, K, H].
      mask: bool, of four axes broadcastable to [B, N, T, S], or None.
      bias: Added to the scores, of four axes broadcastable to [B, N, T, S], or None.

    Returns:
      [B, T, N, H].
    """
    return _forward(options, q, k, v, mask, bias)[0]


def _forward(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    out, statistics = FORWARD.bind(q, k, v, *present(mask, bias), given=_given(mask, bias), **options._asdict())
    return out, (q, k, v, mask, bias, out, statistics)


def _backward(options: Options, residuals: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, mask, bias, out, statistics = residuals
    arrays = (q, k, v, *present(mask, bias), out, statistics, cotangent)
    dq, dk, dv, *dbias = BACKWARD.bind(*arrays, given=_given(mask, bias), **options._asdict())
    return dq, dk, dv, None, dbias[0] if dbias else None


def _given(mask: Any, bias: Any) -> Given:
    return Given(mask is not None, bias is not None)


fused_attention.defvjp(_forward, _backward)


def _formula_forward(q: Any, k: Any, v: Any, *rest: Any, given: Given, formula: Formula, **options: Any) -> Any:
    del options
    (b, t, n, _), (mask, bias, _) = q.shape, given.split(rest)
    return formula(q, k, v, mask, bias), jnp.zeros((b, n, t, 1), np.float32)


def _formula_backward(q: Any, k: Any, v: Any, *rest: Any, given: Given, formula: Formula, **options: Any) -> Any:
    """Differentiate the formula, which is computed again."""
    del options
    mask, bias, (_, _, cotangent) = given.split(rest)
    _, vjp = jax.vjp(lambda q, k, v, bias=None: formula(q, k, v, mask, bias), q, k, v, *present(bias))
    return vjp(cotangent)


def _cudnn_forward(q: Any, k: Any, v: Any, *rest: Any, given: Given, formula: Formula, **options: Any) -> Any:
    del formula
    mask, bias, _ = given.split(rest)
    arrays, settings = _cudnn_arguments(q, k, mask, bias, **options)
    call = jax_internals.fused_attention._dot_product_attention_fwd_p_wrapper
    out, statistics = call.bind(q, k, v, *arrays, **settings, is_training=True)
    return _where_attended(out, mask, **options), statistics[..., None]


def _cudnn_backward(q: Any, k: Any, v: Any, *rest: Any, given: Given, formula: Formula, **options: Any) -> Any:
    del formula
    mask, bias, (out, statistics, cotangent) = given.split(rest)
    arrays, settings = _cudnn_arguments(q, k, mask, bias, **options)
    cotangent = _where_attended(cotangent, mask, **options)
    call = jax_internals.fused_attention._dot_product_attention_bwd_p_wrapper
    dq, dk, dv, *dbias = call.bind(q, k, v, *arrays, statistics[..., 0], out, cotangent, **settings)
    return dq, dk, dv, *(_sum_to(bias.shape, x) for x in dbias)


def _cudnn_arguments(
    q: Any, k: Any, mask: Any, bias: Any, *, causal: bool, scale: float, window: int | None
) -> tuple[list[Any], dict[str, Any]]:
    """Return JAX's arguments between q, k, v and the residuals: bias, lengths, offsets, pages; and its parameters."""
    module = jax_internals.fused_attention
    unused = jnp.zeros(0, q.dtype)
    settings = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (mask is not None or bias is not None, bias is not None),  # a bias, and its gradient
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **jax_internals.score_setting(),
    }
    return [_additive(q, k, mask, bias), *[unused] * 6], settings


def _additive(q: Any, k: Any, mask: Any, bias: Any) -> Any:
    """Return mask and bias as the one array [1 or B, 1 or N, T, S] that is added to the scores."""
    t, n, s = q.shape[1], q.shape[2], k.shape[1]
    if mask is None and bias is None:
        return jnp.zeros(0, q.dtype)
    rows, heads = np.broadcast_shapes(*(x.shape[:2] for x in present(mask, bias)))
    shape = rows, heads if bias is None else n, t, s
    added = jnp.broadcast_to(q.dtype.type(0) if bias is None else bias, shape)
    if mask is None:
        return added
    return jnp.where(jnp.broadcast_to(mask, shape), added, q.dtype.type(MASKED[q.dtype.name]))


def _sum_to(shape: tuple[int, ...], x: Any) -> Any:
    """Return the sum of `x` over the axes along which an array of `shape` was repeated, in float32 at least."""
    axes = tuple(i for i, size in enumerate(shape) if size != x.shape[i])
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return wide.sum(axes, keepdims=True).astype(x.dtype) if axes else x


def _where_attended(x: Any, mask: Any, *, causal: bool, scale: float, window: int | None) -> Any:
    """Return `x` [B, T, N, H], with 0 for the queries whose keys are all masked."""
    del scale
    if mask is None:
        return x
    t, s = x.shape[1], mask.shape[3]
    mask = mask & visible(t, s, window) if causal and s > 1 else mask
    return jnp.where(mask.any(-1, keepdims=True).swapaxes(1, 2), x, 0)


def visible(t: int, s: int, window: int | None) -> np.ndarray:
    """Return bool [1, 1, T, S]: the keys that a causal query attends to.

    >>> visible(3, 3, 2)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    lower = np.tril(np.ones((1, 1, t, s), bool))
    return lower if window is None else np.triu(lower, 1 - window)


def _shapes_forward(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> list[Any]:
    del k, v, rest, options
    b, t, n, _ = q.shape
    return [q, q.update(shape=(b, n, t, 1), dtype=np.dtype(np.float32))]


def _shapes_backward(q: Any, k: Any, v: Any, *rest: Any, given: Given, **options: Any) -> list[Any]:
    del options
    return [q, k, v, *present(given.split(rest)[1])]


def _fold_batch(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    """Apply a primitive under `jax.vmap`, whose axis becomes part of the rows."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    first = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    rows = first[0].shape[1]
    folded = [jnp.broadcast_to(x, (size, rows, *x.shape[2:])).reshape(-1, *x.shape[2:]) for x in first]
    outs = [y.reshape(size, rows, *y.shape[1:]) for y in primitive.bind(*folded, **options)]
    if primitive is BACKWARD and len(outs) > 3:  # the gradient of a bias that may have one row for all of q
        bias = first[3 + options["given"].mask]
        outs[3] = jax.vmap(functools.partial(_sum_to, bias.shape[1:]))(outs[3])
    return outs, [0] * len(outs)


def _primitive(name: str, shapes: Callable[..., Any], cudnn: Callable[..., Any], formula: Callable[..., Any]) -> Any:
    def lower_on_cuda(ctx: Any, *args: Any, **options: Any) -> Any:
        q = ctx.avals_in[0]
        needed = (9, 0) if q.shape[-1] > 128 or options["given"].bias else (8, 0)
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
"""(q, k, v[, mask][, bias]) -> (out, statistics of the softmax, float32 [B, N, T, 1])."""

BACKWARD = _primitive("fused_attention_backward", _shapes_backward, _cudnn_backward, _formula_backward)
"""(q, k, v[, mask][, bias], out, statistics, cotangent) -> gradients of q, k, v[ and bias]."""
