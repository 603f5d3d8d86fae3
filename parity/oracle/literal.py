"""The number that a program wrote, from what float32 kept of it."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

SIMPLE = 10_000
"""The largest product of numerator and denominator of a number that a program is taken to have meant exactly."""
FORMS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda x: x, lambda r: r),
    (lambda x: x * x, math.sqrt),  # 1/√d of attention
    (lambda x: math.pi * x * x, lambda r: math.sqrt(r / math.pi)),  # √(2/π) of GELU, 1/√2π of densities
    (lambda x: x / math.pi, lambda r: r * math.pi),
    (math.exp, math.log),  # log 10000 of positions
    (lambda x: x * math.log(2), lambda r: r / math.log(2)),
)
"""What makes a constant a simple fraction, and what brings it back."""


def meant(x: float, dtype: Any = np.float32) -> float:
    """The number that a program meant which now holds `x`, what `dtype` rounded it to.

    That is a decimal of few digits or, of float32, a fraction, root, logarithm or part of π as simple as programs
    use, if there is one that rounds to `x`; else `x` itself.

    >>> numbers = (1e-6, 1 / 3, math.sqrt(1 / 24), math.sqrt(2 / math.pi), math.log(10000))
    >>> [meant(float(np.float32(y))) == y for y in numbers]
    [True, True, True, True, True]
    >>> meant(0.7316888)
    0.7316888
    """
    rounded = np.asarray(x, dtype)
    return next((y for y in _candidates(x, dtype) if np.asarray(y, dtype) == rounded), x)


def _candidates(x: float, dtype: Any) -> Iterator[float]:
    """From the likeliest to the least likely."""
    if not math.isfinite(x) or x.is_integer():
        return
    digits = jnp.finfo(dtype).precision
    yield float(f"{x:.{min(digits, 4)}g}")
    if dtype == np.float32 and 1e-4 < abs(x) < 1e2:
        for simple, back in FORMS:
            number = simple(abs(x))
            fraction = Fraction(number).limit_denominator(1 + int(math.sqrt(SIMPLE / number)))
            if 0 < fraction.numerator * fraction.denominator <= SIMPLE:
                yield math.copysign(back(float(fraction)), x)
    yield float(f"{x:.{digits}g}")
