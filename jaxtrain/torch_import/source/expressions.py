"""Python expressions as text, with parentheses where they are needed."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.torch_import.graph import Ref

ATOM = 10
"""Precedence of names, calls, subscripts and literals."""
_LEVELS = {"**": 9, "-x": 8, "~": 8, "*": 7, "/": 7, "@": 7, "//": 7, "%": 7, "+": 6, "-": 6, "<<": 5, ">>": 5}
_LEVELS |= {"&": 4, "^": 3, "|": 2, "==": 1, "!=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1}


class Expr(NamedTuple):
    """An expression with its precedence; of an array, with its shape and dtype."""

    text: str
    level: int = ATOM
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None

    def like(self, array: "Expr") -> "Expr":
        """Return the expression with the shape and dtype of another one."""
        return self._replace(shape=array.shape, dtype=array.dtype)

    def __str__(self) -> str:
        return self.text


def binary(operator: str, x: Any, y: Any) -> Expr:
    """Return `x operator y`."""
    level = _LEVELS[operator]
    # Comparisons do not associate, powers to the right.
    left = level + 1 if level == 1 or operator == "**" else level
    x, y = within(literal(x), left), within(literal(y), level if operator == "**" else level + 1)
    # The formatter writes powers of simple operands without spaces.
    tight = operator == "**" and all(_is_simple(text) for text in (x, y))
    return Expr(f"{x}{operator}{y}" if tight else f"{x} {operator} {y}", level)


def unary(operator: str, x: Any) -> Expr:
    """Return `operator x`."""
    return Expr(operator + within(literal(x), 8), 8)


def within(x: Expr, level: int) -> str:
    """Return an expression's text as an operand of an operator of a level."""
    return x.text if x.level >= level else f"({x.text})"


def call(function: str, *args: Any, **kwargs: Any) -> Expr:
    """Return a call, without keyword arguments that are None."""
    written = [literal(x).text for x in args]
    written += [f"{name}={literal(x).text}" for name, x in kwargs.items() if x is not None]
    return Expr(f"{function}({', '.join(written)})")


def method(x: Any, name: str, *args: Any, **kwargs: Any) -> Expr:
    """Return a call of a method of x."""
    return call(f"{within(literal(x), ATOM)}.{name}", *args, **kwargs)


def attribute(x: Any, name: str) -> Expr:
    """Return an attribute of x."""
    return Expr(f"{within(literal(x), ATOM)}.{name}")


def subscript(x: Any, *indices: Any) -> Expr:
    """Return `x[indices]`."""
    return Expr(f"{within(literal(x), ATOM)}[{', '.join(literal(i).text for i in indices)}]")


def literal(value: Any) -> Expr:
    """Return a value as an expression: numbers, strings, tuples, dtypes, and expressions as they are."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, tuple | list):
        items = [literal(item).text for item in value]
        return Expr(f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})")
    if isinstance(value, np.dtype):
        return Expr("bool" if value == np.bool_ else f"jnp.{value.name}")
    if isinstance(value, str):
        return Expr('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"')
    if isinstance(value, float) and not math.isfinite(value):
        return Expr("jnp.nan") if math.isnan(value) else Expr("jnp.inf") if value > 0 else Expr("-jnp.inf", 8)
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        return Expr(_number(value), 8)
    return Expr(_number(value) if isinstance(value, float) else repr(value))


def _number(value: int | float) -> str:
    return repr(value).replace("e-0", "e-").replace("e+", "e")


def _is_simple(text: str) -> bool:
    return text.lstrip("-").replace(".", "").replace("_", "").isalnum()


def structure(value: Any, resolve: Callable[[str], Expr]) -> Expr:
    """Return the module's result as an expression."""
    if isinstance(value, Ref):
        return resolve(value.name)
    if isinstance(value, dict):
        items = ", ".join(f"{literal(key)}: {structure(item, resolve)}" for key, item in value.items())
        return Expr(f"{{{items}}}")
    if isinstance(value, tuple):
        return literal(tuple(structure(item, resolve) for item in value))
    return literal(value)
