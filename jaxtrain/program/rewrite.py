"""Rewrite a JAX function equation by equation, through its control flow.

`transform(fn, rule)` traces `fn` to a jaxpr and evaluates it again, calling `rule` for every equation. If the rule
returns None, a higher-order equation (jit, scan, while, cond, checkpoint, custom_jvp) is rebuilt by the public
function that created it, with its body rewritten in turn, and any other equation is bound unchanged. The result is an
ordinary JAX function, which can be differentiated, vmapped and jitted.

It depends on the layout of JAX's equations (parameter names of higher-order primitives, `Primitive.get_bind_params`)
and on a private name: JAX has no public rewriter, and no public way to give an equation the source line of another
(`source_info_util`, as in `jax.core.eval_jaxpr`), without which errors, profiles and scopes would name this file.
"""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.program import operations as op
from jaxtrain.program.equations import (
    body,
    is_opaque,
    scan_operands,
    scan_sizes,
    shardings,
    while_loop,
    within,
)
from jaxtrain.program.internals import manual_axes, readable_equations, source_info_util

Run = Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]
"""Evaluates a jaxpr under the current rule: `run(jaxpr, consts, args)`."""

Rule = Callable[[JaxprEqn, list[Any], Run], Sequence[Any] | None]
"""Returns an equation's outputs, or None to leave it unchanged: `rule(eqn, args, run)`."""

Where = Callable[[JaxprEqn], bool]
"""Returns whether a rule may change an equation."""


def transform(fn: Callable[..., Any], rule: Rule, where: Where | None = None) -> Callable[..., Any]:
    """Rewrite a function: `rule` may replace every equation of its jaxpr.

    Args:
      fn: The function.
      rule: The rule.
      where: As for `interpret`.

    >>> import jax.numpy as jnp
    >>> def sines_to_cosines(eqn, args, run):
    ...     return [jnp.cos(args[0])] if eqn.primitive.name == "sin" else None
    >>> float(transform(jnp.sin, sines_to_cosines)(0.0))
    1.0
    """

    return retrace(fn, lambda closed, leaves: interpret(closed.jaxpr, closed.consts, leaves, rule, where))


def make_jaxpr(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As `jax.make_jaxpr`, to the equations that this module reads, whatever JAX's flags."""
    return readable_equations()(jax.make_jaxpr(fn, **options))


_jaxpr_and_shape = functools.partial(jax.make_jaxpr, return_shape=True)


def retrace(
    fn: Callable[..., Any],
    evaluate: Callable[[ClosedJaxpr, list[Any]], list[Any]],
    trace: Callable[..., Any] = _jaxpr_and_shape,
) -> Callable[..., Any]:
    """Return `fn` with its jaxpr evaluated by `evaluate(closed, leaves of the arguments)`; `trace(fn)` is a function of
    the arguments to (jaxpr, shapes of the results)."""

    @functools.wraps(fn)
    @readable_equations()
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        closed, out_shape = trace(fn)(*args, **kwargs)
        outs = evaluate(closed, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(out_shape), map(jax.numpy.asarray, outs))

    return evaluated


def interpret(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], rule: Rule, where: Where | None = None
) -> list[Any]:
    """Evaluate `jaxpr` under `rule`.

    Args:
      jaxpr: The jaxpr.
      consts: Its constants.
      args: Its arguments, which may have other dtypes than it was traced with.
      rule: The rule.
      where: Whether the rule may change an equation. A higher-order equation with no such equation inside, and no
        derivative of its own, is bound as it was traced, which takes less time; the rule keeps shapes and dtypes.
        None for a rule that may change every equation, or dtypes.

    Returns:
      Its results.
    """

    def run(inner: Jaxpr, inner_consts: Sequence[Any], inner_args: Sequence[Any]) -> list[Any]:
        return interpret(inner, inner_consts, inner_args, rule, where)

    def may_change(inner: JaxprEqn) -> bool:
        return where is None or where(inner) or op.of(inner) in op.CUSTOM

    consts = consts or getattr(jaxpr, "consts", ())  # since JAX 0.11 a jaxpr that is not called closed may have some
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_in_mode, consts), *args], strict=True))
    for eqn, dead in zip(jaxpr.eqns, _dead_after(jaxpr), strict=True):
        inputs = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        with _source_of(eqn):
            outs = rule(eqn, inputs, run)
            if outs is None:
                outs = apply(eqn, inputs, run) if any(map(may_change, within(eqn))) else bind(eqn, inputs)
        env.update(zip(eqn.outvars, outs, strict=True))
        for v in dead:
            del env[v]
        del inputs, outs
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _in_mode(const: Any) -> Any:
    """Return a constant in 32 bits where 64-bit types are disabled.

    JAX keeps the constant that it made of a NumPy array in x64 mode, and uses it in later traces without that mode.
    """
    dtype = getattr(const, "dtype", None)
    if not isinstance(dtype, np.dtype) or (to := jax.dtypes.canonicalize_dtype(dtype)) == dtype:
        return const
    return np.asarray(const).astype(to)


def _dead_after(jaxpr: Jaxpr) -> list[list[Any]]:
    """Return for every equation the variables that nothing after it reads."""
    read = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    dead: list[list[Any]] = []
    for eqn in reversed(jaxpr.eqns):
        variables = dict.fromkeys(v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal))
        dead.append([v for v in variables if v not in read])
        read.update(variables)
    return dead[::-1]


@contextmanager
def _source_of(eqn: JaxprEqn) -> Iterator[None]:
    """Give equations traced inside the source line, the scopes and the settings of `eqn`."""
    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes), eqn.ctx.manager:
        yield


def apply(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    """Apply the equation to `args`; `run` evaluates the jaxprs within it."""
    rebuild = HIGHER_ORDER.get(op.of(eqn))
    return bind(eqn, args) if rebuild is None else rebuild(eqn, args, run)


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Apply the equation to `args`."""
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def bind_as_traced(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Apply the equation to `args`, converted to the dtypes it was traced with."""
    return bind(eqn, cast_like([v.aval for v in eqn.invars], args))


def cast_like(avals: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Convert `values` to the dtypes of `avals`; opaque values (keys) are left unchanged."""
    return [_cast(aval, value) for aval, value in zip(avals, values, strict=True)]


def evaluate_inner(body: Any, args: Sequence[Any], run: Run) -> list[Any]:
    """Evaluate a jaxpr among an equation's parameters, closed or not, under the current rule."""
    return run(body.jaxpr, body.consts, args) if isinstance(body, ClosedJaxpr) else run(body, (), args)


def jit_once(fn: Callable[..., Any], mark: Callable[..., Any]) -> Callable[..., Any]:
    """Return `jax.jit(mark(fn))`, the same one for every call with the same `fn`, so that eager calls compile once.

    A partial of a function with plain numbers and strings is the same if these are equal. The program is stored with
    the function itself and is freed with it.

    >>> def twice(fn):
    ...     def call_twice(x):
    ...         return fn(fn(x))
    ...     return call_twice
    >>> jit_once(jax.numpy.sin, twice) is jit_once(jax.numpy.sin, twice)
    True
    """
    owner, options = fn, ()
    if isinstance(fn, functools.partial):
        owner, options = fn.func, (*fn.args, *sorted(fn.keywords.items()))
    if not _is_function(owner) or not all(map(_is_plain, options)):
        return jax.jit(mark(fn))
    programs = owner.__dict__.setdefault("_jaxtrain_programs", {})
    # By id too: functools.wraps copies the dict of one function to another.
    key = (id(owner), mark, options)
    if key not in programs:
        programs[key] = owner, jax.jit(mark(fn))
    return programs[key][1]


def _is_function(fn: Callable[..., Any]) -> bool:
    """Return whether `fn` is a function, plain or wrapped by JAX: a callable module has attributes of its own."""
    return isinstance(fn, types.FunctionType) or type(fn).__module__.partition(".")[0] in ("jax", "jaxlib")


def _is_plain(option: Any) -> bool:
    return isinstance(option, (int, float, str)) or (isinstance(option, tuple) and all(map(_is_plain, option)))


def _cast(aval: Any, value: Any) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) or aval.dtype == jax.dtypes.float0:
        return value
    if getattr(value, "dtype", None) == aval.dtype:
        return value
    return lax.convert_element_type(value, aval.dtype)


def _jit(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    body = eqn.params["jaxpr"]

    def fn(*inner: Any) -> list[Any]:
        return run(body.jaxpr, body.consts, inner)

    fn.__name__ = eqn.params["name"]
    of_sides = {"in_shardings": shardings(eqn, "in_shardings"), "out_shardings": shardings(eqn, "out_shardings")}
    placed: dict[str, Any] = {side: entries for side, entries in of_sides.items() if any(entries)}
    return jax.jit(fn, inline=eqn.params["inline"], **placed)(*args)


def _evaluate_called(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    """Evaluate the jaxpr of an equation that is nothing but its jaxpr, applied to its operands."""
    return evaluate_inner(body(eqn), args, run)


def _with_metadata(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    with set_xla_metadata(**dict(eqn.params["xla_metadata"])):
        return _evaluate_called(eqn, args, run)


def _shard_map(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    body = eqn.params["jaxpr"]
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    return list(jax.shard_map(lambda *a: tuple(run(body, (), a)), axis_names=manual_axes(eqn), **options)(*args))


def _checkpoint(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    body, policy, prevent_cse = (eqn.params[k] for k in ("jaxpr", "policy", "prevent_cse"))
    return jax.checkpoint(lambda *a: run(body, (), a), policy=policy, prevent_cse=prevent_cse)(*args)


def _scan(eqn: JaxprEqn, args: list[Any], run: Run, results: Sequence[Any] = ()) -> list[Any]:
    body = eqn.params["jaxpr"]
    n_consts, n_carry = scan_sizes(eqn)
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
    carry_avals = results[:n_carry] or body.in_avals[n_consts : n_consts + n_carry]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = run(body.jaxpr, body.consts, [*consts, *carry, *x])
        return cast_like(carry_avals, outs[:n_carry]), outs[n_carry:]

    options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, cast_like(carry_avals, init), xs, **options)
    return [*carry, *ys]


def unroll_scan(
    eqn: JaxprEqn,
    args: list[Any],
    run: Run,
    between: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    index: Callable[[Any, int], Any] = lambda x, i: lax.index_in_dim(x, i, keepdims=False),
    stack: Callable[[Sequence[Any], Any], Any] = lambda values, _: jax.numpy.stack(values),
) -> list[Any]:
    """Evaluate a scan step by step, its body once per step.

    Args:
      eqn: The scan.
      args: Its operands, arrays or values of another kind.
      run: Evaluates a body.
      between: Replaces, before each step, its carry and the slices of the step after it, of which the last has none.
      index: `index(x, i)` is slice i of an operand.
      stack: `stack(values, aval)` are the results of all steps, whose shape and dtype `aval` has, as one.

    Returns:
      Its results.
    """
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    consts, carry, xs = scan_operands(eqn, args)
    n_carry = len(carry)
    ys: list[list[Any]] = [[]] * length
    steps = [*reversed(range(length))] if eqn.params["reverse"] else [*range(length)]
    slices = [[index(x, i) for x in xs] for i in steps]
    for i, own, following in zip(steps, slices, [*slices[1:], []], strict=True):
        if between is not None:
            carry, following[:] = between(carry, following)
        outs = run(body.jaxpr, body.consts, [*consts, *carry, *own])
        carry, ys[i] = outs[:n_carry], outs[n_carry:]
    return [*carry, *map(stack, zip(*ys, strict=True), body.out_avals[n_carry:])]


def run_while(eqn: JaxprEqn, args: list[Any], run: Run, is_true: Callable[[Any], bool]) -> list[Any]:
    """Evaluate a while loop turn by turn, as long as `is_true` of its condition."""
    loop = while_loop(eqn)
    end = loop.n_condition + loop.n_body
    of_condition, of_body, carry = args[: loop.n_condition], args[loop.n_condition : end], args[end:]
    while is_true(evaluate_inner(loop.condition, [*of_condition, *carry], run)[0]):
        carry = evaluate_inner(loop.body, [*of_body, *carry], run)
    return carry


def _while(eqn: JaxprEqn, args: list[Any], run: Run, results: Sequence[Any] = ()) -> list[Any]:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, init = args[:n_cond], args[n_cond : n_cond + n_body], args[n_cond + n_body :]
    carry_avals = results or body.in_avals[n_body:]

    def condition(carry: list[Any]) -> Any:
        return run(cond.jaxpr, cond.consts, [*cond_consts, *carry])[0]

    def step(carry: list[Any]) -> list[Any]:
        return cast_like(carry_avals, run(body.jaxpr, body.consts, [*body_consts, *carry]))

    return lax.while_loop(condition, step, cast_like(carry_avals, init))


def _cond(eqn: JaxprEqn, args: list[Any], run: Run, results: Sequence[Any] = ()) -> list[Any]:
    def branch(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *a: cast_like(results or closed.out_avals, run(closed.jaxpr, closed.consts, a))

    branches = [branch(b) for b in eqn.params["branches"]]
    if (platforms := eqn.params.get("branches_platforms")) is None:
        return lax.switch(args[0], branches, *args[1:])
    of = {name: fn for names, fn in zip(platforms, branches, strict=True) for name in names or ("default",)}
    return lax.platform_dependent(*args[1:], **of)


def _custom_jvp(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    body, n_consts = eqn.params["call_jaxpr"], eqn.params["num_consts"]

    @jax.custom_jvp
    def fn(*inner: Any) -> list[Any]:
        return run(body.jaxpr, body.consts, inner)

    @fn.defjvp
    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        instantiated = [False] * (len(primals) - n_consts)
        rule, rule_consts, zero_tangents = eqn.params["jvp_jaxpr_fun"].call_wrapped(*instantiated)
        outs = run(rule, rule_consts, [*primals[n_consts:], *tangents[n_consts:]])
        n = len(zero_tangents)
        primals_out, nonzero = fn(*primals), iter(outs[n:])
        avals = [jax.typeof(p).to_tangent_aval() for p in primals_out]
        tangents_out = [
            np.zeros(aval.shape, aval.dtype) if zero else _cast(aval, next(nonzero))
            for aval, zero in zip(avals, zero_tangents, strict=True)
        ]
        return primals_out, tangents_out

    return fn(*args)


def _custom_vjp(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any]:
    body, backward = eqn.params["call_jaxpr"], eqn.params["bwd"]
    if is_opaque(eqn):
        return bind_as_traced(eqn, args)

    @jax.custom_vjp
    def fn(*inner: Any) -> list[Any]:
        return run(body.jaxpr, body.consts, inner)

    def fwd(*inner: Any) -> tuple[list[Any], list[Any]]:
        rule, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*[True] * len(inner))
        outs = run(rule, consts, inner)
        n = len(outs) - len(body.out_avals)
        computed = iter(zip(outs[:n], rule.outvars[:n], strict=True))
        _, _, forwarded = eqn.params["out_trees"]()
        residuals = [next(computed) if i is None else (inner[i], body.jaxpr.invars[i]) for i in forwarded]
        traced[:] = [_shaped(var.aval) for _, var in residuals]
        return outs[n:], [x for x, _ in residuals]

    traced: list[jax.ShapeDtypeStruct] = []  # the residuals as the rule's author wrote them

    def bwd(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        outs = [_shaped(aval) for aval in body.out_avals]
        closed = jax.make_jaxpr(lambda *a: _gradients(backward.call_wrapped(*a)))(*traced, *outs)
        grads = run(closed.jaxpr, closed.consts, [*residuals, *cotangents])
        return tuple(_cast(jax.typeof(x).to_tangent_aval(), g) for x, g in zip(args, grads, strict=True))

    fn.defvjp(fwd, bwd)
    return fn(*args)


def _shaped(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _gradients(returned: Any) -> list[Any]:
    """Return the gradients of a backward rule, with JAX's symbolic zeros (arguments without a gradient) as arrays."""
    if isinstance(returned[0], list):
        returned, _ = returned  # since JAX 0.11: and a log
    arrays = (jax.Array, np.ndarray)
    return [x if isinstance(x, arrays) else np.zeros(x.aval.shape, x.aval.dtype) for x in returned]


HIGHER_ORDER: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys(op.EVALUATIONS, _evaluate_called),
    op.JIT: _jit,
    op.PJIT: _jit,
    op.REMAT2: _checkpoint,
    op.CHECKPOINT: _checkpoint,
    op.SCAN: _scan,
    op.WHILE: _while,
    op.COND: _cond,
    op.CUSTOM_JVP_CALL: _custom_jvp,
    op.CUSTOM_VJP_CALL: _custom_vjp,
    op.SHARD_MAP: _shard_map,
    "xla_metadata_call": _with_metadata,
}
"""Functions that rebuild an equation, `(eqn, args, run)`; those of loops and branches also take `results`, shapes and
dtypes of their carries, or of their results, if these are not the traced ones."""
