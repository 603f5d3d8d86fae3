"""The values of a program, equation by equation, and the lines that its equations come from."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.rewrite import Rule, Run, evaluate_inner, run_while, unroll_scan

Inside = Sequence[JaxprEqn]
"""The functions, loops and branches that an equation is in, outermost first."""

Visit = Callable[[JaxprEqn, list[Any], Inside], Sequence[Any]]
"""Returns an equation's outputs: `visit(eqn, args, inside)`."""


def record(
    visit: Visit,
    *,
    is_one: Callable[[JaxprEqn], bool] = lambda _: False,
    lift: Callable[[Any, JaxprEqn, Inside], Any] = lambda x, *_: x,
    array: Callable[[Any], Any] | None = None,
    **slices: Callable[..., Any],
) -> Rule:
    """Return a rule for `transform` or `interpret` that evaluates a program for those who look at its values.

    Functions are evaluated in place and scans step by step, so that each layer of a model has values of its own.

    Args:
      visit: Evaluates an equation.
      is_one: Whether an equation is visited as a whole, whatever it contains.
      lift: Returns an operand of an equation as a value of another kind than arrays.
      array: Returns the array that decides a `while` or a `cond`; None to visit these as a whole.
      **slices: `index` and `stack` of `unroll_scan`.

    Example:
      >>> import jax
      >>> from jaxtrain.program.rewrite import bind, transform
      >>> def visit(eqn, args, inside):
      ...     print(eqn.primitive.name, *args, "in", [outer.primitive.name for outer in inside])
      ...     return bind(eqn, args)
      >>> _ = transform(lambda x: jax.lax.scan(lambda c, _: (c * 2.0, None), x, length=2)[0], record(visit))(3.0)
      mul 3.0 2.0 in ['scan']
      mul 6.0 2.0 in ['scan']
    """
    inside: list[JaxprEqn] = []

    def contents(eqn: JaxprEqn, args: list[Any], run: Run) -> list[Any] | None:
        name = op.of(eqn)
        if is_one(eqn):
            return None
        if name in op.APPLICATIONS:
            return evaluate_inner(equations.body(eqn), args, run)
        if name == op.SCAN:
            return unroll_scan(eqn, args, run, **slices)
        if name == op.WHILE and array is not None:
            return run_while(eqn, args, run, lambda x: bool(array(x)))
        if name == op.COND and array is not None:
            return evaluate_inner(equations.branches(eqn)[int(array(args[0]))], args[1:], run)
        return None

    def rule(eqn: JaxprEqn, args: list[Any], run: Run) -> Sequence[Any]:
        values = [lift(x, eqn, inside) for x in args]
        inside.append(eqn)
        try:
            outs = contents(eqn, values, run)
        finally:
            inside.pop()
        return visit(eqn, values, inside) if outs is None else outs

    return rule


def line_of(eqn: JaxprEqn, inside: Inside, is_user: Callable[[str], bool]) -> tuple[str, int] | None:
    """Return the innermost line of a file that `is_user` accepts; for a derivative, that of the original operation."""
    frames, calls = frames_of(eqn), [x for x in inside if op.of(x) in op.APPLICATIONS]
    if calls:
        # JAX traces a jitted function once: beyond the function itself, the frames are those of its first caller.
        name = equations.label(calls[-1])
        names = [frame.function_name.rpartition(".")[2] for frame in frames]
        frames = frames[: names.index(name) + 1] if name in names else []
    line = next(((frame.file_name, frame.line_num) for frame in frames if is_user(frame.file_name)), None)
    return line_of(calls[-1], calls[:-1], is_user) if line is None and calls else line


def frames_of(eqn: JaxprEqn) -> list[Any]:
    """Return the frames in which an equation was traced, innermost first."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else traceback.frames
