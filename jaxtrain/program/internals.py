"""The internals of JAX that this project depends on, each with a probe.

JAX has no public rewriter of jaxprs and no public key-value store between processes. The code therefore reads the
parameters of higher-order primitives and a few private modules. They are all listed here: private modules are imported
from here only, `jaxtrain doctor` reports what the installed JAX lacks, and a test runs every probe.
"""

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint, lax
from jax.experimental import xla_metadata
from jax.extend.core import JaxprEqn

from jaxtrain.errors import UserError


def _private(module: str) -> Any:
    """Return a module of `jax._src`, or None, so that the doctor can run and report that it is missing."""
    try:
        return importlib.import_module(f"jax._src.{module}")
    except ImportError:
        return None


source_info_util: Any = _private("source_info_util")
"""Gives an equation the source line and the scopes of the equation that it replaces."""

distributed: Any = _private("distributed")
"""Holds the client of the key-value store that the processes of a run share."""

fused_attention: Any = _private("cudnn.fused_attention_stablehlo")
"""Holds the primitives of cuDNN's attention, which the public function binds only where the process has cuDNN."""

_dispatch: Any = _private("dispatch")
_config: Any = _private("config")

OF_HIJAX = ("remat3", "custom_vjp3", "custom_jvp3", "scan3")
"""JAX's flags, each "jax_" and its name, by which functions of JAX bind operations of `jax.experimental.hijax`."""


@contextlib.contextmanager
def readable_equations() -> Iterator[None]:
    """Let `jax.checkpoint`, custom derivatives and scans be traced to the equations that `jaxpr` reads.

    The values are the same: JAX's flags (`OF_HIJAX`) choose between two implementations.

    Raises:
      UserError: A `jax.custom_vjp` has rules of `defremat` only, which JAX has for one of the two.
    """
    with contextlib.ExitStack() as stack:
        for flag in OF_HIJAX:
            if hasattr(_config, flag):
                stack.enter_context(getattr(_config, flag)(False))
        try:
            yield
        except NotImplementedError as error:
            if "custom_vjp.defremat" not in str(error):
                raise
            raise UserError("a jax.custom_vjp has rules of defremat alone: give it rules of defvjp too") from error


def needs_devices_when_lowered(primitive: Any) -> None:
    """Let the lowering of `primitive` see the devices that a program is compiled for."""
    if _dispatch is not None:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


def compute_capability(ctx: Any) -> tuple[int, int]:
    """Return that of the GPUs that a lowering is for, if JAX's calls of cuDNN's attention are known.

    Args:
      ctx: The `LoweringRuleContext` of a primitive lowered for CUDA.

    Returns:
      (major, minor); (8, 0) if the devices are unknown, and (0, 0) if the installed JAX calls cuDNN differently.
    """
    if not all(probe() for probe in (_attention_is_known, _attention_backward_is_known)):
        return 0, 0
    context = ctx.module_context.axis_context
    mesh_devices = getattr(getattr(context, "mesh", None), "_flat_devices_tuple", ())
    devices = getattr(context, "device_assignment", None) or mesh_devices
    # A program exported for CUDA may be lowered with the devices of this machine.
    major, _, minor = getattr(devices[0] if devices else None, "compute_capability", "8.0").partition(".")
    return int(major), int(minor)


def is_for_one_device(ctx: Any) -> bool:
    """Return whether a lowering is for one device, without a mesh or within a `jax.shard_map` over all of its axes.

    Args:
      ctx: The `LoweringRuleContext` of a primitive.
    """
    context = ctx.module_context.axis_context
    axes = getattr(getattr(context, "mesh", None), "axis_names", ())
    is_manual = bool(axes) and {*axes} == {*getattr(context, "manual_axes", ())}
    return is_manual or getattr(context, "num_devices", None) == 1


def runs_whole(ctx: Any) -> bool:
    """Return whether what a lowering returns is run as it is by every device of a program that is compiled now.

    It is not where the compiler divides arrays over devices, outside of `jax.shard_map`, and in an export.

    Args:
      ctx: The `LoweringRuleContext` of a primitive.
    """
    return not _is_exported(ctx) and is_for_one_device(ctx)


def is_divided(ctx: Any) -> bool:
    """Return whether the compiler divides what a lowering returns over several devices, with no axis of a mesh manual.

    Args:
      ctx: The `LoweringRuleContext` of a primitive.
    """
    context = ctx.module_context.axis_context
    is_manual = bool(getattr(context, "manual_axes", ()))
    return not _is_exported(ctx) and not is_manual and getattr(context, "num_devices", 1) > 1


def _is_exported(ctx: Any) -> bool:
    exported: bool = getattr(getattr(ctx.module_context, "lowering_parameters", None), "for_export", True)
    return exported


_ATTENTION = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
_RESIDUALS = ("activation", "fwd_output", "grad_output")
_SETTINGS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")


def _attention_is_known() -> bool:
    names = tuple(inspect.signature(fused_attention._dot_product_attention_fwd_impl).parameters)
    before = (*_ATTENTION, *_SETTINGS, "is_training")
    return names in (before, (*_ATTENTION, "score_mod_args", *_SETTINGS, "score_mod", "is_training"))


def _attention_backward_is_known() -> bool:
    names = tuple(inspect.signature(fused_attention._dot_product_attention_bwd_impl).parameters)
    arrays = (*_ATTENTION, *_RESIDUALS)
    return names in ((*arrays, *_SETTINGS), (*arrays, "score_mod_args", *_SETTINGS, "score_mod"))


def score_setting() -> dict[str, None]:
    """Return the parameter by which cuDNN's attention computes its own scores, which JAX has since 0.12: None."""
    newer = "score_mod" in inspect.signature(fused_attention._dot_product_attention_fwd_impl).parameters
    return {"score_mod": None} if newer else {}


@contextlib.contextmanager
def assumed_cudnn(version: tuple[int, int, int]) -> Iterator[None]:
    """Lower for a version of cuDNN where none is installed."""
    major, minor, patch = version
    number = major * 10_000 + minor * 100 + patch
    installed = fused_attention.check_cudnn_version
    fused_attention.check_cudnn_version = lambda: number
    try:
        yield
    finally:
        fused_attention.check_cudnn_version = installed


def manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    """Return the axes of the mesh that a `shard_map` divides its operands over."""
    # JAX 0.10.1 and earlier have the second name.
    axes: frozenset[str] = next(eqn.params[name] for name in _MANUAL_AXES if name in eqn.params)
    return axes


_MANUAL_AXES = ("newly_manual_axes", "manual_axes")


_rewrite, _processes, _fused = "program.rewrite", "distributed.processes", "models.attention.cudnn"


class Internal(NamedTuple):
    """One thing that a library does not promise.

    Attributes:
      name: What is used, as it is spelled in the code.
      used_by: The module that depends on it.
      probe: Returns whether the installed version has it; may raise where it has not.
    """

    name: str
    used_by: str
    probe: Callable[[], bool]


def missing_internals(internals: Sequence[Internal]) -> list[Internal]:
    """Return the internals that the installed JAX, or another library, lacks.

    >>> missing_internals(INTERNALS)
    []
    """

    def is_missing(internal: Internal) -> bool:
        try:
            return not internal.probe()
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration):
            return True

    return [internal for internal in internals if is_missing(internal)]


def has(owner: Callable[[], Any], *names: str) -> Callable[[], bool]:
    """Return a probe of attributes."""
    return lambda: all(hasattr(owner(), name) for name in names)


def _equation(fn: Callable[..., Any] = jnp.sin, primitive: str = "sin|cos") -> JaxprEqn:
    """Return the first equation of `fn` that is of one of these primitives, "a|b"."""
    eqns = readable_equations()(jax.make_jaxpr(fn))(jnp.ones(3)).eqns
    return next(eqn for eqn in eqns if eqn.primitive.name in primitive.split("|"))


def _has_params(primitive: str, fn: Callable[..., Any], *params: str) -> Internal:
    """Probe the name of the primitive that `fn` traces to, and the names of its parameters."""
    return Internal(
        f"{primitive}[{', '.join(params)}]", _rewrite, lambda: {*params} <= _equation(fn, primitive).params.keys()
    )


def _is_callable(primitive: str, fn: Callable[..., Any], param: str) -> Internal:
    """Probe that a parameter is a function that `call_wrapped` calls."""
    return Internal(
        f"{primitive}[{param}].call_wrapped",
        _rewrite,
        lambda: callable(_equation(fn, primitive).params[param].call_wrapped),
    )


@jax.custom_jvp
def _with_jvp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (_with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def _with_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (_with_vjp(x), x), lambda x, g: (g * x,))


@jax.custom_batching.custom_vmap
def _with_vmap(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_with_vmap.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def _parts_are_readable() -> bool:
    """Return whether the parts that differentiation splits off a checkpoint have their jaxpr where it is read."""
    gradient = jax.grad(lambda x: jax.checkpoint(lambda x: _scan(x) * _scan(x))(x))
    return "call_jaxpr" in _equation(gradient, "eval_jaxpr|closed_call").params


def _composites_are_readable() -> bool:
    return not {"call_jaxpr", "jaxpr"}.isdisjoint(_equation(lax.composite(jnp.sin, "sine"), "composite").params)


def _metadata_is_readable() -> bool:
    call = getattr(xla_metadata, "xla_metadata_call", None)  # since JAX 0.12
    return (
        call is None or {"jaxpr", "xla_metadata"} <= _equation(call(jnp.sin, of="x"), "xla_metadata_call").params.keys()
    )


def _hijax_is_readable() -> bool:
    hijax: Any = _private("hijax")
    operation = hijax.HiPrim if hasattr(hijax, "HiPrim") else hijax.VJPHiPrimitive
    # Every operation sets its own `in_avals`.
    is_read = callable(operation.expand) and "self.in_avals" in inspect.getsource(operation.__init__)
    return is_read and hijax.call_hi_primitive_p.name == "call_hi_primitive"


def _flags_are_known() -> bool:
    """Return whether no other flag of JAX is one of hijax, by its name, and those there are can be set for a while."""
    newer = re.compile(r"jax_((?:remat|scan|custom_.*)3)")
    flags = {found[1] for name in jax.config.values if (found := newer.fullmatch(name))}
    with readable_equations():
        return flags <= {*OF_HIJAX} and not any(getattr(_config, name).value for name in flags)


def _sharded(x: jax.Array) -> jax.Array:
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("i",), axis_types=types, devices=jax.local_devices()[:1])
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, y: (carry + y, y), jnp.zeros(()), x)[0]


def _product(x: jax.Array) -> jax.Array:
    return lax.dot(x, x)


def _ragged_product(x: jax.Array) -> jax.Array:
    return lax.ragged_dot(x[:, None], x[:, None, None], jnp.ones(3, np.int32))


def _constrained(x: jax.Array) -> jax.Array:
    return lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))


def _scan_sizes_are_readable() -> bool:
    params = _equation(_scan, "scan").params
    if "ft_in" in params:  # since JAX 0.11
        return len(params["ft_in"].unpack()) == 3
    return params["num_consts"] == 0 and params["num_carry"] == 1


def _traceback_frames() -> bool:
    traceback: Any = _equation().source_info.traceback
    frame = traceback.frames[0]
    return all(hasattr(frame, name) for name in ("file_name", "line_num", "function_name"))


def _parents_are_recorded() -> bool:
    found: list[Any] = []

    def mean(x: jax.Array) -> jax.Array:
        found.append(jnp.mean(x))
        return found[0]

    jax.make_jaxpr(jax.grad(mean))(jnp.ones(3))
    equation = found[0].primal.parent
    literal = equation.in_tracers[1]
    return equation.primitive.name == "div" and float(getattr(literal.val, "val", literal.val)) == 3


def _name_stack_parts() -> bool:
    scoped = jax.named_scope("scope")(jnp.sin)
    return [part.name for part in _equation(scoped).source_info.name_stack.stack] == ["scope"]


INTERNALS: tuple[Internal, ...] = (
    Internal(
        "jax._src.source_info_util.current_name_stack, user_context",
        _rewrite,
        has(lambda: source_info_util, "current_name_stack", "user_context"),
    ),
    Internal(
        "jax._src.distributed.global_state.client, process_id, num_processes",
        _processes,
        has(lambda: distributed.global_state, "client", "process_id", "num_processes"),
    ),
    Internal(
        "DistributedRuntimeClient.key_value_set, key_value_dir_get, blocking_key_value_get, wait_at_barrier",
        _processes,
        has(
            lambda: importlib.import_module("jax._src.lib")._jax.DistributedRuntimeClient,
            *("key_value_set", "key_value_dir_get", "blocking_key_value_get", "wait_at_barrier"),
        ),
    ),
    Internal(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
        "cost.gpu.target",
        has(lambda: fused_attention, "check_cudnn_version"),
    ),
    Internal("JaxprEqn.source_info.traceback.frames", "program.recorded_values", _traceback_frames),
    Internal("Tracer.primal, parent.primitive, parent.in_tracers, val.val", "step.checks.means", _parents_are_recorded),
    Internal("JaxprEqn.source_info.name_stack.stack", _rewrite, _name_stack_parts),
    Internal(f"jax._src.config.{', '.join(OF_HIJAX)}", _rewrite, _flags_are_known),
    Internal("JaxprEqn.ctx.manager", _rewrite, has(lambda: _equation().ctx, "manager")),
    Internal(
        "Primitive.bind, get_bind_params, multiple_results",
        _rewrite,
        has(lambda: _equation().primitive, "bind", "get_bind_params", "multiple_results"),
    ),
    Internal("ShapedArray.to_tangent_aval", _rewrite, has(lambda: jax.typeof(jnp.ones(3)), "to_tangent_aval")),
    _has_params("jit|pjit", jax.jit(jnp.sin), "jaxpr", "name", "in_shardings", "out_shardings", "inline"),
    _has_params("checkpoint|remat2", jax.checkpoint(jnp.sin), "jaxpr", "policy", "prevent_cse"),
    Internal("eval_jaxpr[call_jaxpr] or closed_call[call_jaxpr]", _rewrite, _parts_are_readable),
    Internal("composite[call_jaxpr] or composite[jaxpr]", _rewrite, _composites_are_readable),
    _has_params("custom_vmap_call", _with_vmap, "call"),
    Internal("xla_metadata_call[jaxpr, xla_metadata]", _rewrite, _metadata_is_readable),
    Internal("call_hi_primitive[_prim].expand, in_avals", _rewrite, _hijax_is_readable),
    _has_params("scan", _scan, "jaxpr", "length", "reverse", "unroll"),
    Internal("scan[num_consts, num_carry] or scan[ft_in]", _rewrite, _scan_sizes_are_readable),
    _has_params(
        "while",
        lambda x: lax.while_loop(lambda x: x[0] < 9, jnp.exp, x),
        *("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"),
    ),
    _has_params("cond", lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "branches"),
    _has_params("cond", lambda x: lax.platform_dependent(x, cuda=jnp.sin, default=jnp.cos), "branches_platforms"),
    _has_params("dot_general", _product, "dimension_numbers", "precision", "preferred_element_type"),
    _has_params("ragged_dot_general", _ragged_product, "ragged_dot_dimension_numbers"),
    _has_params(
        "conv_general_dilated",
        lambda x: lax.conv(x[None, None], x[None, None], (1,), "SAME"),
        *("dimension_numbers", "precision", "preferred_element_type", "window_strides", "padding"),
        *("lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count"),
    ),
    _has_params("gather", lambda x: x[jnp.zeros((2, 1), np.int32)], "dimension_numbers"),
    _has_params("convert_element_type", lambda x: x.astype(np.int32), "new_dtype"),
    _has_params("transpose", lambda x: jnp.outer(x, x).T, "permutation"),
    _has_params("reduce_sum", jnp.sum, "axes"),
    _has_params("squeeze", lambda x: lax.squeeze(x[None], (0,)), "dimensions"),
    _has_params("broadcast_in_dim", lambda x: lax.broadcast(x, (2,)), "broadcast_dimensions"),
    _has_params("reshape", lambda x: lax.reshape(x, (3, 1)), "dimensions", "sharding"),
    _has_params("split", lambda x: lax.split(x, (1, 2)), "axis", "sizes"),
    _has_params("name", lambda x: ad_checkpoint.checkpoint_name(x, "x"), "name"),
    _has_params("sharding_constraint", _constrained, "sharding"),
    Internal("cudnn._dot_product_attention_fwd_p_wrapper", _fused, _attention_is_known),
    Internal("cudnn._dot_product_attention_bwd_p_wrapper", _fused, _attention_backward_is_known),
    Internal(
        "dispatch.prim_requires_devices_during_lowering",
        _fused,
        has(lambda: _dispatch, "prim_requires_devices_during_lowering"),
    ),
    Internal(
        "mlir.LoweringParameters.for_export",
        "models.attention.primitives",
        has(lambda: _private("interpreters.mlir").LoweringParameters, "for_export"),
    ),
    _has_params("custom_jvp_call", _with_jvp, "call_jaxpr", "num_consts", "jvp_jaxpr_fun"),
    _is_callable("custom_jvp_call", _with_jvp, "jvp_jaxpr_fun"),
    _has_params("custom_vjp_call", _with_vjp, "call_jaxpr", "num_consts", "symbolic_zeros", "out_trees"),
    _is_callable("custom_vjp_call", _with_vjp, "fwd_jaxpr_thunk"),
    _is_callable("custom_vjp_call", _with_vjp, "bwd"),
    _has_params("shard_map", _sharded, "jaxpr", "mesh", "in_specs", "out_specs", "check_vma"),
    Internal(
        "shard_map[newly_manual_axes] or shard_map[manual_axes]",
        _rewrite,
        lambda: manual_axes(_equation(_sharded, "shard_map")) == {"i"},
    ),
)
