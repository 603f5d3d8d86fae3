"""Bugs planted in a port's step, one operation at a time, to see how many the numbers would have shown.

All bugs are in one program, which takes the number of the bug that it has: it is compiled once. A bug that goes
unnoticed is a line that the batches do not exercise, or whose value does not matter, as that of a maximum which a
softmax subtracts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64
from parity.progress import report
from parity.sides.jax_lines import line_of
from parity.source import source_line
from parity.verify.contract import Target
from parity.verify.port_program import PortProgram, port_batch
from parity.verify.source_case import SourceCase
from parity.verify.updates import Update, over_bars

MOST = 40
"""Bugs that are planted: those of a larger program are drawn at random."""
UPDATES = 20

_Wrong = tuple[str, Callable[[list[Any]], Any]]
"""What is wrong, and the wrong result of an equation's arguments."""


@dataclass(frozen=True)
class Planted:
    """The outcome.

    Attributes:
      total: Number of bugs.
      unnoticed: The line and the bug of each that was not noticed.
    """

    total: int
    unnoticed: tuple[str, ...]

    def __str__(self) -> str:
        """One line.

        >>> print(Planted(40, ("port.py:3: x + b: second term of add left out",)))
        noticed 39 of 40 planted bugs
        """
        return f"noticed {self.total - len(self.unnoticed)} of {self.total} planted bugs"


def planted(case: SourceCase, target: Target, seed: int) -> Planted:
    """Plant bugs in the step of a port that holds, and compare each in float64 with the step as it is.

    Args:
      case: The source.
      target: The port.
      seed: Seed of weights and data, and of the choice of bugs.

    Returns:
      How many bugs were noticed.
    """
    program = PortProgram(target, "fp64")
    with jax.enable_x64(True):
        state = program.first_state(case, seed)
        batches = [port_batch(batch, "fp64") for batch in case.batches(seed, case.most(UPDATES))]
        buggy = _Buggy(target.step, state, batches[0], np.random.default_rng(seed))
        report("planted bugs: JAX compiles")
        right = [*_updates(case, program, partial(buggy.step, which=-1), state, batches)]
        unnoticed = []
        for number, bug in enumerate(buggy.bugs):
            report(f"planted bugs: JAX, update {number + 1} of {len(buggy.bugs)}")
            ours = _updates(case, program, partial(buggy.step, which=number), state, batches)
            seen, noticed = _until_noticed(ours, right)
            if not noticed:
                unnoticed.append(bug + f" (changes nothing in {len(batches)} updates)" * all(map(_same, seen, right)))
    return Planted(len(buggy.bugs), tuple(unnoticed))


def _updates(
    case: SourceCase, program: PortProgram, step: Callable[..., Any], state: Any, batches: Sequence[Any]
) -> Iterator[Update]:
    for batch in batches:
        state, loss = step(state, batch)
        yield Update(float(loss), {}, program.snapshot(case, state))


def _until_noticed(wrong: Iterator[Update], right: Sequence[Update]) -> tuple[list[Update], bool]:
    """Return the updates up to the first that differs, and whether one does."""
    seen = []
    for number, (ours, expected) in enumerate(zip(wrong, right, strict=True), start=1):
        seen.append(ours)
        if any(over_bars(ours, expected, number, has_gradients=False)):
            return seen, True
    return seen, False


def _same(one: Update, other: Update) -> bool:
    tensors = [{**update.after.params, **update.after.buffers} for update in (one, other)]
    return one.loss == other.loss and all(np.array_equal(x, tensors[1][name]) for name, x in tensors[0].items())


class _Buggy:
    """A step in float64 with bugs, of which the argument `which` of `step` selects one.

    Attributes:
      bugs: The line and the bug of each.
      step: The step.
    """

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any, rng: np.random.Generator) -> None:
        closed, shapes = rewrite.make_jaxpr(in_float64(step), return_shape=True)(state, batch)
        jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        chosen = _chosen(jaxpr, rng)
        self.bugs = [bug for bug, _, _ in chosen]
        numbers: dict[int, list[tuple[int, Callable[[list[Any]], Any]]]] = {}
        for number, (_, eqn, wrong) in enumerate(chosen):
            numbers.setdefault(id(eqn), []).append((number, wrong))

        def buggy(state: Any, batch: Any, which: Any) -> Any:
            rule = partial(_rule, numbers, which)
            outs = rewrite.interpret(jaxpr, closed.consts, jax.tree.leaves((state, batch)), rule)
            return jax.tree.unflatten(jax.tree.structure(shapes), outs)

        self.step = jit(buggy)


def _rule(
    numbers: Mapping[int, Sequence[tuple[int, Callable[[list[Any]], Any]]]],
    which: Any,
    eqn: JaxprEqn,
    args: list[Any],
    run: rewrite.Run,
) -> list[Any] | None:
    if op.of(eqn) in op.APPLICATIONS:
        return rewrite.evaluate_inner(equations.body(eqn), args, run)
    if id(eqn) not in numbers:
        return None
    (out,) = rewrite.bind(eqn, args)
    for number, wrong in numbers[id(eqn)]:
        out = jnp.where(which == number, jnp.asarray(wrong(args), out.dtype), out)
    return [out]


def _chosen(jaxpr: Any, rng: np.random.Generator) -> list[tuple[str, JaxprEqn, Callable[[list[Any]], Any]]]:
    """Return bugs as (line and bug, equation, its wrong result): of those alike in one line, one."""
    alike: dict[str, list[tuple[JaxprEqn, Callable[[list[Any]], Any]]]] = {}
    for eqn in equations.visit(jaxpr):
        line = line_of(eqn)
        for what, wrong in _wrong_results(eqn) if line is not None else ():
            assert line is not None
            alike.setdefault(f"{source_line(*line)}: {what}", []).append((eqn, wrong))
    bugs = [(bug, *sites[rng.integers(len(sites))]) for bug, sites in alike.items()]
    kept = sorted(rng.permutation(len(bugs))[:MOST].tolist())
    return [bugs[i] for i in kept]


def _wrong_results(eqn: JaxprEqn) -> Iterator[_Wrong]:
    """Yield the bugs that an equation of floating-point numbers may have."""
    name, result = op.of(eqn), _aval(eqn.outvars[0])
    if len(eqn.outvars) != 1 or not jnp.issubdtype(getattr(result, "dtype", np.bool_), np.floating):
        return
    shapes = [_aval(v).shape for v in eqn.invars]
    for i, v in enumerate(eqn.invars):
        value = np.asarray(v.val) if isinstance(v, Literal) else np.zeros(1)
        if value.ndim == 0 and np.issubdtype(value.dtype, np.floating) and np.isfinite(value) and value:
            other = _other_constant(float(value))
            yield f"{value:.6g} as {other:.6g}", partial(_with_constant, eqn, i, other)
    adds_zero = name in (op.ADD, op.SUB) and isinstance(eqn.invars[1], Literal) and not np.any(eqn.invars[1].val)
    if name in _ALL_BUT_FIRST and shapes[0] == result.shape and not adds_zero:
        yield f"{name} left out", lambda args: args[0]
    if name == op.SUB:
        yield "sub with its operands swapped", lambda args: args[1] - args[0]
    if name in (op.MAX, op.MIN):
        other_name, other_function = (op.MIN, jnp.minimum) if name == op.MAX else (op.MAX, jnp.maximum)
        yield f"{other_name} for {name}", lambda args: other_function(*args)
    if name == op.SELECT_N and shapes[1:] == [result.shape] * 2:
        yield "select without its condition", lambda args: args[1]
        yield "select with its condition always met", lambda args: args[2]
    if name == op.INTEGER_POW:
        yield "one power more", lambda args: rewrite.bind(eqn, args)[0] * args[0]
    is_square = len(shapes[0]) == 2 and len(set(shapes[0])) == 1 if shapes else False
    if name in (op.REDUCE_SUM, op.REDUCE_MAX) and is_square and len(equations.axes(eqn)) == 1:
        yield f"{name} over the other axis", lambda args: rewrite.bind(eqn, [args[0].T])[0]
    if name == op.REDUCE_SUM and np.prod(shapes[0]) > result.size > 0:
        yield f"mean for {name}", lambda args: rewrite.bind(eqn, args)[0] * (result.size / max(args[0].size, 1))
    if name == op.DOT_GENERAL and len(shapes[1]) == 2 and shapes[1][0] == shapes[1][1]:
        yield "second matrix transposed", lambda args: rewrite.bind(eqn, [args[0], args[1].T])[0]
    if name == op.TRANSPOSE and is_square:
        yield "transpose left out", lambda args: args[0]


def _aval(v: Any) -> Any:
    """The shape and dtype of a variable or a literal."""
    return v.aval


_ALL_BUT_FIRST = frozenset(
    {
        *(op.ADD, op.ADD_ANY, op.SUB, op.MUL, op.DIV, op.NEG, op.EXP, op.LOG, op.LOG1P, op.TANH, op.LOGISTIC, op.SQRT),
        *(op.RSQRT, op.ERF, op.ABS, op.SQUARE, op.POW),
    }
)
"""Operations that a bug leaves out: the result is the first operand."""


def _other_constant(c: float) -> float:
    """Return a constant that is wrong as in a port: ten times a small one, 0.99 for 0.9, else a tenth more.

    >>> [_other_constant(c) for c in (1e-8, 0.9, 2.0)]
    [1e-07, 0.99, 2.2]
    """
    if abs(c) < 1e-2:
        return 10 * c
    return round(1 - (1 - c) / 10, 12) if 0.5 < c < 1 else 1.1 * c


def _with_constant(eqn: JaxprEqn, i: int, constant: float, args: list[Any]) -> Any:
    changed = [lax.full_like(x, constant) if k == i else x for k, x in enumerate(args)]
    return rewrite.bind(eqn, changed)[0]
