"""Recover the literal of a program from its rounded value."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

SIMPLE = 10_000
"""Largest product of numerator and denominator of a fraction that counts as a literal."""
FORMS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda x: x, lambda r: r),
    (lambda x: x * x, math.sqrt),  # 1/√d of attention
    (lambda x: math.pi * x * x, lambda r: math.sqrt(r / math.pi)),  # √(2/π) of GELU, 1/√2π of densities
    (lambda x: x / math.pi, lambda r: r * math.pi),
    (math.exp, math.log),  # log 10000 of positions
    (lambda x: x * math.log(2), lambda r: r / math.log(2)),
)
"""Pairs of a function that maps a constant to a simple fraction, and its inverse."""


def written_number(x: float, dtype: Any = np.float32) -> float:
    """Return the number that a program wrote and `dtype` rounded to `x`.

    It is a decimal of few digits or, for float32, a simple fraction, root, logarithm or multiple of π that rounds to
    `x`; `x` itself if there is none.

    >>> numbers = (1e-6, 1 / 3, math.sqrt(1 / 24), math.sqrt(2 / math.pi), math.log(10000), math.log(0.999))
    >>> [written_number(float(np.float32(y))) == y for y in numbers]
    [True, True, True, True, True, True]
    >>> written_number(0.7316888)
    0.7316888
    """
    with np.errstate(over="ignore"):  # the number may be another dtype's, such as its lowest
        rounded = np.asarray(x, dtype)
    return next((y for y in _candidates(x, dtype) if np.asarray(y, dtype) == rounded), x)


def _candidates(x: float, dtype: Any) -> Iterator[float]:
    """Candidates, the likeliest first."""
    if not math.isfinite(x) or x.is_integer():
        return
    digits = jnp.finfo(dtype).precision
    yield float(f"{x:.{min(digits, 4)}g}")
    if dtype == np.float32 and 1e-4 < abs(x) < 1e2:
        if abs(x) < math.log(2):
            yield math.copysign(math.log(float(f"{math.exp(-abs(x)):.4g}")), x)  # an optimizer's log β
        for simple, back in FORMS:
            number = simple(abs(x))
            fraction = Fraction(number).limit_denominator(1 + int(math.sqrt(SIMPLE / number)))
            if 0 < fraction.numerator * fraction.denominator <= SIMPLE:
                yield math.copysign(back(float(fraction)), x)
    yield float(f"{x:.{digits}g}")
