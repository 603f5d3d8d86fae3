"""Give every marked block of a program its own slice of per-block arrays, also in scans over layers.

The blocks that `jaxtrain.block` marks are counted in program order: a scan over 12 layers has 12. They are found in
jitted and checkpointed functions and in scans; a block inside another, or inside a `cond`, a `while_loop`, a
`shard_map` or a function with its own derivative, is not counted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.passes.memory.remat import BLOCK
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

AtBlock = Callable[[Any, Callable[[Sequence[Any]], list[Any]], list[Any]], Sequence[Any]]
"""Returns a block's results: `at_block(own, call, args)`, where `own` are its slices of the per-block arrays and
`call(args)` evaluates it."""

Run = Callable[[Jaxpr, Sequence[Any], Sequence[Any], Any], list[Any]]
"""Evaluates a jaxpr with the per-block arrays of its blocks: `run(jaxpr, consts, args, arrays)`."""

Visit = Callable[[JaxprEqn, list[Any], Any, Run], Sequence[Any]]
"""Returns an equation's results: `visit(eqn, args, arrays, run)`, where `arrays` are those of its blocks, if any."""


def at_blocks(fn: Callable[..., Any], arrays: Any, at_block: AtBlock) -> Callable[..., Any]:
    """Replace the marked blocks of a function by functions of per-block arrays.

    Args:
      fn: A function of arrays, some layers of which are marked by `jaxtrain.block`.
      arrays: Pytree of arrays [blocks, …], in the order of the program.
      at_block: Evaluates a block: `at_block(own, call, args)` returns what `call(args)` does, a list of arrays; `own`
        is a pytree like `arrays`, without their first axis.

    Returns:
      The same function. When traced it raises `UserError` if it has another number of blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain import block
      >>> def layers(x):
      ...     return jax.lax.scan(lambda x, _: (block(jnp.sin)(x), None), block(jnp.cos)(x), None, length=2)[0]
      >>> times = at_blocks(layers, jnp.array([1.0, 2.0, 3.0]), lambda own, call, args: [own * x for x in call(args)])
      >>> float(times(0.0)) == float(3 * jnp.sin(2 * jnp.sin(1.0)))
      True
    """

    def visit(eqn: JaxprEqn, args: list[Any], own: Any, run: Run) -> Sequence[Any]:
        if is_block(eqn):
            return at_block(of_one(own), partial(rewrite.bind, eqn), args)
        return enter(eqn, args, own, run)

    def evaluated(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        given, found = {x.shape[0] for x in jax.tree.leaves(arrays)}, count(closed.jaxpr)
        if given - {found}:
            raise UserError(f"arrays are of {given.pop()} blocks, but the program has {found}: pass {found} rows")
        return evaluate(closed, leaves, arrays, visit)

    return rewrite.retrace(fn, evaluated)


def count_blocks(fn: Callable[..., Any], *args: Any) -> int:
    """Return the number of marked blocks of `fn(*args)`, each as often as it runs.

    >>> import jax.numpy as jnp
    >>> from jaxtrain import block
    >>> count_blocks(lambda x: jax.lax.scan(lambda x, _: (block(jnp.sin)(x), None), x, None, length=12), 1.0)
    12
    """
    return count(rewrite.make_jaxpr(fn)(*args).jaxpr)


def count(traced: Jaxpr) -> int:
    """Return the number of marked blocks of a jaxpr."""
    return sum(map(blocks_of, equations.of(traced)))


def blocks_of(eqn: JaxprEqn) -> int:
    """Return the number of marked blocks of an equation."""
    if is_block(eqn):
        return 1
    name = op.of(eqn)
    if name == op.SCAN:
        return equations.trip_count(eqn) * count(equations.body(eqn).jaxpr)
    return sum(map(count, equations.inner_jaxprs(eqn))) if name in op.FUNCTIONS else 0


def is_block(eqn: JaxprEqn) -> bool:
    """Return whether the equation calls a function marked by `jaxtrain.block`."""
    return equations.is_call(eqn, BLOCK)


def of_one(arrays: Any) -> Any:
    """Return the only row of each array [1, …]."""
    return jax.tree.map(lambda x: x[0], arrays)


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], arrays: Any, visit: Visit) -> list[Any]:
    """Evaluate a jaxpr by visiting its equations, each with the per-block arrays of its blocks.

    Args:
      closed: The jaxpr.
      args: Its arguments.
      arrays: Pytree of arrays [blocks, …].
      visit: Evaluates an equation; `enter` is how it evaluates one whose blocks are inside.
    """

    def run(traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any], arrays: Any) -> list[Any]:
        first: dict[int, int] = {}
        total = 0
        for eqn in equations.of(traced):
            first[id(eqn)] = total
            total += blocks_of(eqn)

        def rule(eqn: JaxprEqn, args: list[Any], _: rewrite.Run) -> Sequence[Any]:
            start, n = first[id(eqn)], blocks_of(eqn)
            own = arrays if n == total else jax.tree.map(lambda x: x[start : start + n], arrays)
            return visit(eqn, args, own if n else None, run)

        return rewrite.interpret(traced, consts, args, rule)

    return run(closed.jaxpr, closed.consts, args, arrays)


def enter(eqn: JaxprEqn, args: list[Any], arrays: Any, run: Run) -> Sequence[Any]:
    """Evaluate an equation that is no block: its blocks, if it has any, by `run`.

    Arguments may be pytrees in place of arrays; those of a scan's carry must have the structure of what `run` returns.
    """
    if blocks_of(eqn) == 0:
        return rewrite.bind(eqn, args)
    if op.of(eqn) == op.SCAN:
        return _scan(eqn, args, arrays, run)

    def evaluate_body(body: Jaxpr, consts: Sequence[Any], body_args: Sequence[Any]) -> list[Any]:
        return run(body, consts, body_args, arrays)

    return rewrite.HIGHER_ORDER[op.of(eqn)](eqn, args, evaluate_body)


def _scan(eqn: JaxprEqn, args: list[Any], arrays: Any, run: Run) -> list[Any]:
    length = equations.trip_count(eqn)
    of_steps = jax.tree.map(lambda x: x.reshape(length, x.shape[0] // length, *x.shape[1:]), arrays)

    def step(body: Jaxpr, consts: Sequence[Any], step_args: Sequence[Any]) -> list[Any]:
        *own_args, own = step_args
        return run(body, consts, own_args, own)

    return rewrite.HIGHER_ORDER[op.SCAN](eqn, [*args, of_steps], step)
