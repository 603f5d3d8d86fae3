"""Follow values through a program: each stands for an array, and is carried to the operations that use it.

A `Followed` value is a pytree in the place of an array: a parameter that is stored in another form, has a copy, or has
gradients of its own. Functions that are called and checkpoints take it as it is, scans slice it, and equations that
change the layout of an array move it. `follow` does what all of these have in common; a pass adds what its values do
at their use.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

Apply = Callable[[Any], Any]
"""Applies an equation to another array in the place of its first operand."""


class Followed:
    """A value that stands for an array, as a pytree."""

    @abstractmethod
    def used(self) -> Any:
        """Return the array, as an operation that knows nothing of the value uses it."""

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> Any:
        """Return what stands for the result of an equation, such as one that `moves`; None if nothing does.

        Args:
          eqn: The equation, neither a call nor a scan, whose first operand alone is followed.
          rest: Its other operands.
          apply: Applies it to an array.
        """
        del eqn, rest, apply

    def to_slice(self) -> Any:
        """Return the value with arrays that a scan slices by their first axis."""
        return self

    def sliced(self) -> Any:
        """Return what stands for a slice, in the place of the value whose arrays have been sliced."""
        return self


def used(x: Any) -> Any:
    """Return a value as the program uses it."""
    return x.used() if isinstance(x, Followed) else x


def is_followed(x: Any) -> bool:
    """Return whether a value is followed."""
    return isinstance(x, Followed)


def follow(rule: rewrite.Rule) -> rewrite.Run:
    """Return a function that evaluates a jaxpr, some of whose arguments are followed; its results are arrays.

    Args:
      rule: Returns the results of an equation with followed operands; None for those of `carried`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> @jax.tree_util.register_pytree_node_class
      ... class Doubled(Followed, tuple):
      ...     def used(self):
      ...         return 2 * self[0]
      ...     def moved(self, eqn, rest, apply):
      ...         return Doubled((apply(self[0]),))
      ...     def tree_flatten(self):
      ...         return tuple(self), None
      ...     @classmethod
      ...     def tree_unflatten(cls, _, children):
      ...         return cls(children)
      >>> closed = jax.make_jaxpr(lambda w, x: x @ w.T)(jnp.ones((2, 3)), jnp.ones((1, 3)))
      >>> run = follow(lambda eqn, args, run: None)
      >>> run(closed.jaxpr, closed.consts, [Doubled((jnp.ones((2, 3)),)), jnp.ones((1, 3))])
      [Array([[6., 6.]], dtype=float32)]
    """

    def evaluated(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        if not any(map(is_followed, args)):
            return None
        outs = rule(eqn, args, run)
        return carried(eqn, args, run) if outs is None else outs

    return lambda traced, consts, args: [*map(used, rewrite.interpret(traced, consts, args, evaluated))]


def carried(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any]:
    """Return the results of an equation that knows nothing of its followed operands."""
    if op.of(eqn) in op.FUNCTIONS:
        return rewrite.HIGHER_ORDER[op.of(eqn)](eqn, args, run)
    if op.of(eqn) == op.SCAN:
        return scan(eqn, args, run)
    return moved_or_used(eqn, args, partial(rewrite.apply, run=run))


def moved_or_used(eqn: JaxprEqn, args: list[Any], apply: Callable[[JaxprEqn, list[Any]], list[Any]]) -> list[Any]:
    """Return the results of an equation that uses its operands; `apply(eqn, args)` applies it to arrays."""
    first, *rest = args or [None]
    if is_followed(first) and not any(map(is_followed, rest)):
        moved = first.moved(eqn, rest, lambda x: apply(eqn, [x, *rest])[0])
        if moved is not None:
            return [moved]
    return apply(eqn, [*map(used, args)])


def scan(eqn: JaxprEqn, args: Sequence[Any], run: rewrite.Run) -> list[Any]:
    """Return the results of a scan; what `args` has beyond its operands is sliced too, and is passed to `run`."""
    consts, carry, xs = equations.scan_operands(eqn, args)
    end = len(consts) + len(carry)

    def body(traced: Jaxpr, body_consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        slices = [x.sliced() if is_followed(x) else x for x in values[end:]]
        return [*map(used, run(traced, body_consts, [*values[:end], *slices]))]

    xs = [x.to_slice() if is_followed(x) else x for x in xs]
    return rewrite.HIGHER_ORDER[op.SCAN](eqn, [*consts, *map(used, carry), *xs], body)


def moves(eqn: JaxprEqn) -> bool:
    """Return whether an equation changes the layout of its first operand alone."""
    return op.of(eqn) in op.LAYOUT or (op.of(eqn) == op.CUSTOM_VJP_CALL and returns_operand(eqn))


def returns_operand(eqn: JaxprEqn) -> bool:
    """Return whether an equation returns its operand: a constraint of its sharding, or a hook."""
    if op.of(eqn) != op.CUSTOM_VJP_CALL:
        return op.of(eqn) == op.SHARDING_CONSTRAINT
    body = equations.body(eqn).jaxpr
    return constrained_to(eqn) is not None or (not body.eqns and body.outvars == body.invars)


def constrained_to(eqn: JaxprEqn) -> Any:
    """Return the sharding that an equation constrains its operand to, perhaps with a gradient of its own; else None."""
    inner = equations.sole(equations.body(eqn).jaxpr) if op.of(eqn) == op.CUSTOM_VJP_CALL else eqn
    return equations.sharding(inner) if inner is not None and op.of(inner) == op.SHARDING_CONSTRAINT else None


Where = Callable[[JaxprEqn, int], bool]
"""Returns whether something holds of an equation for its operand at a position."""


class Use(NamedTuple):
    """Where a program uses an array.

    Attributes:
      eqn: The equation; None for a result of the program.
      position: Which of its operands the array is.
      variable: The array there, after conversions and changes of its layout.
    """

    eqn: JaxprEqn | None
    position: int
    variable: Any


def enters(eqn: JaxprEqn, i: int) -> bool:
    """Return whether operand i of a call, a checkpoint or a scan is used inside it alone."""
    return op.of(eqn) in op.FUNCTIONS or (op.of(eqn) == op.SCAN and not equations.is_carry(eqn, i))


def uses(traced: Jaxpr, variable: Any, passes: Where, enters: Where = enters) -> Iterator[Use]:
    """Yield the uses of a variable of a jaxpr.

    Args:
      traced: The jaxpr.
      variable: The variable.
      passes: Whether the result of an equation stands for its operand at a position: its uses follow.
      enters: Whether the uses inside an equation follow.
    """
    if any(out is variable for out in traced.outvars):
        yield Use(None, 0, variable)
    for eqn in traced.eqns:
        for i in (i for i, v in enumerate(eqn.invars) if v is variable):
            if passes(eqn, i):
                yield from uses(traced, eqn.outvars[0], passes, enters)
            elif enters(eqn, i):
                (inner,) = equations.inner_jaxprs(eqn)
                yield from uses(inner, inner.invars[i], passes, enters)
            else:
                yield Use(eqn, i, variable)


def sole_sources(
    traced: Jaxpr, reads: Callable[[JaxprEqn], bool], passes: Callable[[JaxprEqn], bool]
) -> Iterator[tuple[Any, JaxprEqn]]:
    """Yield the variables that only certain equations use, with the equations that compute them.

    Args:
      traced: A jaxpr, which is searched with all jaxprs inside it.
      reads: Whether an equation is one that uses them.
      passes: Whether the result of an equation stands for its first operand, which is used in its place.
    """
    for jaxpr in equations.nested(traced):
        producers, read = equations.producers(jaxpr), Counter(equations.reads(jaxpr))
        for v in (v for eqn in jaxpr.eqns if reads(eqn) for v in eqn.invars):
            while not isinstance(v, Literal) and read[v] == 1 and (eqn := producers.get(v)) is not None:
                yield v, eqn
                if not passes(eqn):
                    break
                v = eqn.invars[0]
