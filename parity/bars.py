"""The bars of a verdict: how far apart two runs may be. No tolerance is taken from the caller."""

import math

import numpy as np

FIRST_BAR = 1e-10
"""Relative distance in float64 up to the end of the first step. Rounding is 1e-16, a wrong epsilon 1e-6."""
LAST_BAR = 1e-8
"""The same after more steps, which amplify the rounding of the steps before. A long run may be allowed more
(`parity.compare.trajectory`)."""
NEGLIGIBLE = 1e-12
"""A tensor whose norm is a smaller part of the whole may be zero in mathematics (the gradient of an attention key bias)
and rounding noise in practice: its distance is measured on the scale of the whole."""
UNSTABLE = 0.1
"""An element of a gradient is rounding noise if one ulp of the weights changes it by a larger part of itself."""
SINGLE = float(np.finfo(np.float32).eps)
"""Rounding of a loss, which is float32 in low precisions: a single loss may be closer to the truth by chance."""
FEW_ULPS = 2 * SINGLE
"""Least distance of PyTorch's losses and gradients from the float64 truth that `RATIO_BAR` multiplies. Both sides add
in float32, in another order: by this alone JAX was over the bar in 19 of 455 runs of correct layers of few numbers."""
RATIO_BAR = 2.0
"""Largest distance of a low-precision run from the float64 truth, in units of PyTorch's own distance. It is the factor
that PyTorch's compiler tests allow a compiled model (`torch/_dynamo/utils.py`, `same`)."""
FALSE_ALARM = 1e-4
"""Chance that a tensor is over its bar though both sides round equally well (`tensor_bar`)."""
FP8_RATIO_BAR = 1.5
"""The same in fp8, whose rounding to 8 bits is the same on both sides and exceeds all other rounding."""


def tensor_bar(elements: int, trainings: int) -> float:
    """Return the bar of a tensor's distance from the float64 truth, the median over trainings, in units of PyTorch's.

    It is `RATIO_BAR`, but for tensors of few numbers: the ratio of two root mean squares of n independent errors of
    equal size has the distribution of the square root of an F of n and n degrees of freedom. That of single numbers is
    over 2 in three of ten trainings.

    Args:
      elements: Number of elements of the tensor.
      trainings: Number of trainings; one is a first look, which several decide.

    Returns:
      The bar.

    >>> [round(tensor_bar(n, 5), 1) for n in (1, 4, 16, 1000)], tensor_bar(1, 1)
    ([29.2, 3.2, 2.0, 2.0], 2.0)
    """
    from scipy.special import betaincinv, fdtri

    if trainings == 1:
        return RATIO_BAR
    most = trainings // 2 + 1
    # The median is over a bar if most of the ratios are: a binomial tail.
    each = betaincinv(most, trainings - most + 1, FALSE_ALARM)
    return max(RATIO_BAR, math.sqrt(fdtri(elements, elements, 1 - each)))
