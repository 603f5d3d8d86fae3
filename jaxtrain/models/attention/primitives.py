"""Attention as two primitives, forward and backward, whose computation is chosen when a program is lowered.

A program is traced without knowing what it will be compiled for. The lowering calls cuDNN if the target is CUDA of
compute capability 8.0 or more (9.x for heads wider than 128; 9.0 or more for a bias, whose gradient cuDNN computes from
there on; a target that is unknown, as in an export, is taken to have 8.0) and cuDNN has the kernel for the operands.
Where cuDNN has none, kernels of our own serve the same GPUs. They also compute long packed or padded rows, for which
cuDNN would read a mask of all pairs: its packed layout, as XLA calls it, allocates as many times the memory of the
queries, in float32, as a row may have segments. Every other program computes the formula, or for long sequences the
same attention block by block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxtrain.models.attention import blockwise, cudnn
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.dropout_mask import kept_of_rows
from jaxtrain.models.attention.formula import formula, log_sum_exp
from jaxtrain.models.attention.partitioned import partitioned
from jaxtrain.program import equations, internals
from jaxtrain.program import operations as op

LONG = 256 * 256
"""Number of scores of a head from which attention is one primitive, and on CPUs computed block by block. Measured on
two cores: 12 rows of 4 heads of 32, causal, forward and backward take 8 and 25 ms of processor time for 128 and 256
tokens; the formula takes 10 and 69, without `keep_host_memory`."""

LONG_ON_GPU = 1024 * 1024
"""Number from which other devices compute block by block: a loop of small operations leaves them idle."""


BLOCKS_ON_GPU = (256, 512)
"""Numbers of queries and keys of a block. They have not been timed."""


PARTS = {
    "fused_attention": ((), ("out", "statistics")),
    "fused_attention_backward": (("out", "statistics", "cotangent"), ("dq", "dk", "dv")),
}
"""The arrays of each primitive after the operands, and its results, without the gradients of operands."""


def is_long(t: int, s: int) -> bool:
    """Return whether attention of T queries to S keys is computed by the primitives."""
    return isinstance(t, int) and isinstance(s, int) and t * s >= LONG  # an export may have symbolic sizes


class Target(NamedTuple):
    """What a program is lowered for.

    Attributes:
      on_cpu: Whether it is compiled for CPUs.
      is_divided: Whether it is compiled for several devices, over which the rows are divided.
    """

    on_cpu: bool
    is_divided: bool

    @classmethod
    def of(cls, ctx: Any) -> "Target":
        """Return the target of a lowering."""
        return cls("cpu" in ctx.module_context.platforms, not internals.is_for_one_device(ctx))

    def is_long(self, q: Any, k: Any) -> bool:
        """Return whether attention is computed block by block."""
        return q.shape[1] * k.shape[1] >= (LONG if self.on_cpu else LONG_ON_GPU)

    @property
    def loop(self) -> dict[str, Any]:
        """The arguments of `blockwise`: a GPU computes large blocks of all rows at once."""
        return {"by_row": self.is_divided or not self.on_cpu, "blocks": None if self.on_cpu else BLOCKS_ON_GPU}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_attention(options: Options, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands) -> jax.Array:
    """Compute attention by the primitives.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, V].
      operands: The other arrays.

    Returns:
      [B, T, N, V].
    """
    return _forward(options, q, k, v, operands)[0]


def _forward(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, tuple[Any, ...]]:
    given, others = operands.split()
    out, statistics = FORWARD.bind(q, k, v, *others, given=given, **options._asdict())
    return out, (q, k, v, operands, out, statistics)


def _backward(options: Options, residuals: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, operands, out, statistics = residuals
    given, others = operands.split()
    arrays = q, k, v, *others, out, statistics, cotangent
    dq, dk, dv, *others = BACKWARD.bind(*arrays, given=given, **options._asdict())
    return dq, dk, dv, Operands()._replace(**dict(zip(operands.differentiable(), others, strict=True)))


fused_attention.defvjp(_forward, _backward)


def _width(q: Any) -> int:
    """Return how many statistics there are of a query: the logarithm, and what it lacks by rounding.

    In float32 and float64 the rounding of the logarithm would be most of the error of the gradients.
    """
    return 1 if q.dtype in cudnn.LOW else 2


def _portable_forward(
    q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], target: Target, **options: Any
) -> tuple[Any, Any]:
    operands, _ = Operands.joined(given, rest)
    if target.is_long(q, k) or options["whole"] is not None:
        out, *statistics = blockwise.forward(Options(**options), q, k, v, operands, **target.loop)
        return out.astype(v.dtype), jnp.stack(statistics[: _width(q)], axis=-1)
    (b, t, n, _), wide = q.shape, np.promote_types(q.dtype, np.float32)
    return formula(Options(**options), q, k, v, operands), jnp.zeros((b, n, t, _width(q)), wide)


def _portable_backward(
    q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], target: Target, **options: Any
) -> list[Any]:
    operands, (out, statistics, cotangent) = Operands.joined(given, rest)
    if not target.is_long(q, k) and options["whole"] is None:
        return _explicit_backward(q, k, v, *rest, given=given, **options)
    like = [q, k, v, operands.bias, operands.sinks]
    if statistics.shape[-1] > 1:  # the weights are proportional to the exponentials of what the logarithms lack
        rounding = statistics[..., 1].swapaxes(1, 2)[..., None]
        cotangent = cotangent * jnp.exp(-rounding).astype(cotangent.dtype)
    residuals = operands, out, statistics[..., 0], cotangent
    grads = blockwise.backward(Options(**options), q, k, v, *residuals, **target.loop)
    return [g.astype(x.dtype) for g, x in zip(grads, like, strict=True) if g is not None]


def _explicit_forward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> list[Any]:
    operands, _ = Operands.joined(given, rest)
    statistics = [lse := log_sum_exp(Options(**options), q, k, operands), jnp.zeros_like(lse)]
    return [formula(Options(**options), q, k, v, operands), jnp.stack(statistics[: _width(q)], axis=-1)]


def _explicit_backward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> list[Any]:
    """Differentiate the formula, which is computed again."""
    operands, (_, _, cotangent) = Operands.joined(given, rest)

    def compute(q: Any, k: Any, v: Any, given: dict[str, Any]) -> jax.Array:
        return formula(Options(**options), q, k, v, operands._replace(**given))

    _, vjp = jax.vjp(compute, q, k, v, operands.differentiable())
    dq, dk, dv, others = vjp(cotangent)
    return [dq, dk, dv, *others.values()]


def draws_mask(eqn: JaxprEqn) -> bool:
    """Return whether an equation is the forward primitive with dropout, whose mask is not in its results."""
    return op.of(eqn) == FORWARD.name and "rng" in equations.own(eqn, "given")


def drawn_mask(eqn: JaxprEqn, args: Sequence[Any]) -> jax.Array:
    """Return the dropout mask of such an equation, bool [B, N, T, S]."""
    (_, t, n, _), s = args[0].shape, args[1].shape[1]
    rng = Operands.joined(equations.own(eqn, "given"), args[3:])[0].rng
    assert rng is not None
    return kept_of_rows(equations.own(eqn, "dropout"), rng, (n, t, s))


def as_formula(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the formula of an equation of the forward primitive; its statistics are 0."""

    def compute(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
        options = {name: x for name, x in equations.params(eqn).items() if name != "given"}
        operands, _ = Operands.joined(equations.own(eqn, "given"), rest)
        statistics: Any = eqn.outvars[1].aval
        return [formula(Options(**options), q, k, v, operands), jnp.zeros(statistics.shape, statistics.dtype)]

    return jax.make_jaxpr(compute)(*(v.aval for v in eqn.invars))


def _cudnn_forward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> tuple[Any, Any]:
    operands, _ = Operands.joined(given, rest)
    return cudnn.forward(Options(**options), q, k, v, operands)


def _cudnn_backward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> list[Any]:
    operands, residuals = Operands.joined(given, rest)
    return cudnn.backward(Options(**options), q, k, v, operands, *residuals)


def _pallas() -> Any:
    """Return the module of the kernels; programs for other devices do not wait for its import."""
    from jaxtrain.models.attention import pallas_gpu

    return pallas_gpu


def _pallas_forward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> tuple[Any, Any]:
    operands, _ = Operands.joined(given, rest)
    out, lse = _pallas().forward(Options(**options), q, k, v, operands)
    return out, jnp.stack([lse, jnp.zeros_like(lse)][: _width(q)], axis=-1)


def _pallas_backward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> Any:
    operands, (out, statistics, cotangent) = Operands.joined(given, rest)
    return _pallas().backward(Options(**options), q, k, v, operands, out, statistics[..., 0], cotangent)


def _shapes_forward(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> list[Any]:
    del k, rest, options
    b, t, n, _ = q.shape
    wide = np.promote_types(q.dtype, np.float32)
    return [v.update(shape=(b, t, n, v.shape[-1])), q.update(shape=(b, n, t, _width(q)), dtype=np.dtype(wide))]


def _shapes_backward(q: Any, k: Any, v: Any, *rest: Any, given: tuple[str, ...], **options: Any) -> list[Any]:
    del options
    operands, _ = Operands.joined(given, rest)
    return [q, k, v, *operands.differentiable().values()]


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
    if primitive is BACKWARD:  # operands with gradients may have one row for all of q
        operands, _ = Operands.joined(options["given"], first[3:])
        of = zip(operands.differentiable().values(), outs[3:], strict=True)
        outs[3:] = [jax.vmap(functools.partial(cudnn.sum_to, x.shape[1:]))(y) for x, y in of]
    return outs, [0] * len(outs)


def _is_by_cudnn(ctx: Any, options: Options, q: Any, k: Any, v: Any, operands: Operands) -> bool:
    """Return whether cuDNN computes an attention on the GPUs that a lowering is for."""
    supported = q.dtype in cudnn.LOW and cudnn.is_supported(options, q, k, v, operands)
    return supported and cudnn.is_on(internals.compute_capability(ctx), q, operands)


def _has_kernel(ctx: Any, options: Options, q: Any, k: Any, v: Any, operands: Operands) -> bool:
    """Return whether a kernel of our own computes an attention on the GPUs that a lowering is for."""
    is_long_enough = is_long(q.shape[1], k.shape[1]) or options.whole is not None
    # Gradients of what rows share would be sums over devices.
    is_on_mesh = internals.is_divided(ctx) and not operands.differentiable()
    if not is_long_enough or not (internals.runs_whole(ctx) or is_on_mesh):
        return False
    found: bool = _pallas().has_kernel(internals.compute_capability(ctx), q, k, v, operands)
    return found


def _with_settings(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute` with the precision of its options, in the scope by which costs of programs find attention."""

    def run(*arrays: Any, **options: Any) -> Any:
        scope = f"{name}_causal" if options["causal"] else name
        with jax.default_matmul_precision(options["precision"]), jax.named_scope(scope):
            return compute(*arrays, **options)

    return run


def _on_mesh(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute` for programs that the compiler divides over devices."""
    residuals, results = PARTS[name]

    def run(*arrays: Any, given: tuple[str, ...], **options: Any) -> list[Any]:
        kernel = functools.partial(_with_settings(name, compute), given=given, **options)
        return partitioned(kernel, ("q", "k", "v", *given, *residuals), results, *arrays)

    return run


def _primitive(
    name: str,
    shapes: Callable[..., Any],
    of_cudnn: Callable[..., Any],
    of_pallas: Callable[..., Any],
    portable: Callable[..., Any],
    explicit: Callable[..., Any],
) -> Any:
    def lower(ctx: Any, *args: Any, **options: Any) -> Any:
        return lowered(functools.partial(portable, target=Target.of(ctx)), ctx, *args, **options)

    def lowered(compute: Callable[..., Any], ctx: Any, *args: Any, **options: Any) -> Any:
        return mlir.lower_fun(_with_settings(name, compute), multiple_results=True)(ctx, *args, **options)

    def lower_on_cuda(ctx: Any, *args: Any, given: tuple[str, ...], **options: Any) -> Any:
        q, k, v, *rest = ctx.avals_in
        operands, _ = Operands.joined(given, rest)
        arrays = Options(**options), q, k, v, operands
        is_packed = operands.q_segments is not None and q.shape[1] * k.shape[1] >= LONG_ON_GPU
        by_cudnn = _is_by_cudnn(ctx, *arrays)
        if (is_packed or not by_cudnn) and _has_kernel(ctx, *arrays):
            own = of_pallas if internals.runs_whole(ctx) else _on_mesh(name, of_pallas)
            return lowered(own, ctx, *args, given=given, **options)
        if by_cudnn:
            return lowered(of_cudnn, ctx, *args, given=given, **options)
        return lower(ctx, *args, given=given, **options)

    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **options: Any) -> Any:
        """Differentiate once more, or forward: by the formula, with all scores."""
        if options["whole"] is not None:
            raise NotImplementedError("second derivatives of a part of an attention")
        moving = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

        def compute(*moved: Any) -> list[Any]:
            args = [*primals]
            for i, x in zip(moving, moved, strict=True):
                args[i] = x
            return explicit(*args, **options)

        return jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(lambda *args, **options: _run(primitive, tuple(sorted(options.items())))(*args))
    batching.primitive_batchers[primitive] = functools.partial(_fold_batch, primitive)
    ad.primitive_jvps[primitive] = differentiate
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower_on_cuda, platform="cuda")
    internals.needs_devices_when_lowered(primitive)
    return primitive


@functools.cache
def _run(primitive: Primitive, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return a primitive as a compiled function, for calls outside of `jax.jit`."""
    return jax.jit(lambda *args: primitive.bind(*args, **dict(options)))


FORWARD = _primitive(
    "fused_attention", _shapes_forward, _cudnn_forward, _pallas_forward, _portable_forward, _explicit_forward
)
"""(q, k, v, *operands) -> (out, statistics of the softmax, float32 at least, [B, N, T, 1 or 2])."""

BACKWARD = _primitive(
    "fused_attention_backward",
    _shapes_backward,
    _cudnn_backward,
    _pallas_backward,
    _portable_backward,
    _explicit_backward,
)
"""(q, k, v, *operands, out, statistics, cotangent) -> gradients of q, k, v and of the bias and the sinks if given."""
