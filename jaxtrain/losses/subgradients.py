"""Functions with PyTorch's gradients where the derivative does not exist, or where JAX's differs.

At a kink any slope between its two sides is a subgradient, and the frameworks choose differently: at 0 the slope of
`abs` is 0 in PyTorch and 1 in JAX. Each function here has PyTorch's value and gradient, at the kink and elsewhere, as
`torch/csrc/autograd/FunctionsManual.cpp` and `derivatives.yaml` define it. They consist of JAX's own operations and can
be differentiated twice, batched and compiled.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


def abs(x: jax.Array) -> jax.Array:
    """`torch.abs`: |x|, floating, of the shape and dtype of `x`; at 0 the gradient is 0 (JAX: 1).

    >>> float(jax.grad(abs)(0.0)), float(jax.grad(jnp.abs)(0.0))
    (0.0, 1.0)
    """
    return jnp.where(x == 0, 0, jnp.abs(x))


def clamp(x: jax.Array, min: ArrayLike | None = None, max: ArrayLike | None = None) -> jax.Array:
    """`torch.clamp`: `x` floating, bounded by scalars or by arrays of its rank and dtype; `max` takes precedence.

    At a bound the gradient is that of `x`: 1 (JAX: 0.5).

    >>> float(jax.grad(clamp)(1.0, max=1.0)), float(jax.grad(jnp.clip)(1.0, max=1.0))
    (1.0, 0.5)
    """
    if min is None or max is None:
        bounded = x if min is None else jnp.where(x < min, min, x)
        return bounded if max is None else jnp.where(bounded > max, max, bounded)
    # If the bounds are equal, PyTorch gives neither of them the gradient of an x below.
    least = jnp.where(jnp.less(min, max), min, lax.stop_gradient(min))
    return jnp.where((x > max) | jnp.less(max, min), max, jnp.where(x < min, least, x))


def hardtanh(x: jax.Array, min_val: float = -1.0, max_val: float = 1.0) -> jax.Array:
    """`torch.nn.functional.hardtanh` of floating `x`: at the bounds the gradient is 0 (JAX: 1).

    >>> float(jax.grad(hardtanh)(1.0)), float(jax.grad(jax.nn.hard_tanh)(1.0))
    (0.0, 1.0)
    """
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


def leaky_relu(x: jax.Array, negative_slope: ArrayLike = 0.01) -> jax.Array:
    """`torch.nn.functional.leaky_relu` of floating `x`: at 0 the gradient is the slope (JAX: 1).

    With an array as slope it is `prelu`, whose gradient at 0 is the slope too.

    >>> round(float(jax.grad(leaky_relu)(0.0)), 2), float(jax.grad(jax.nn.leaky_relu)(0.0))
    (0.01, 1.0)
    """
    return jnp.where(x > 0, x, x * negative_slope)


def max(x: jax.Array, axis: int) -> jax.Array:
    """`torch.max(x, axis).values`: the first of equal maxima receives the whole gradient (JAX: they share it).

    The result lacks that axis. `torch.max(x)` and `torch.amax` share it too, as `jnp.max` does.

    >>> jax.grad(max)(jnp.array([3.0, 1.0, 3.0]), 0).tolist()
    [1.0, 0.0, 0.0]
    """
    return _take(x, jnp.argmax(x, axis, keepdims=True), axis)


def min(x: jax.Array, axis: int) -> jax.Array:
    """`torch.min(x, axis).values`: the first of equal minima receives the whole gradient (JAX: they share it).

    >>> jax.grad(min)(jnp.array([3.0, 1.0, 1.0]), 0).tolist()
    [0.0, 1.0, 0.0]
    """
    return _take(x, jnp.argmin(x, axis, keepdims=True), axis)


def median(x: jax.Array, axis: int | None = None) -> jax.Array:
    """`torch.median`: for an even number of values the lower of the middle two (JAX: their mean).

    `x` floating. Along an axis the selected value receives the gradient, among equal ones the one that a stable sort
    puts in the middle; over all of `x` (`axis` None) equal ones share it.

    >>> float(median(jnp.array([3.0, 1.0, 4.0, 2.0]))), float(jnp.median(jnp.array([3.0, 1.0, 4.0, 2.0])))
    (2.0, 2.5)
    """
    if axis is not None:
        middle = jnp.take(jnp.argsort(x, axis), jnp.array([(x.shape[axis] - 1) // 2]), axis)
        first_nan = jnp.argmax(jnp.isnan(x), axis, keepdims=True)
        return _take(x, jnp.where(jnp.isnan(x).any(axis, keepdims=True), first_nan, middle), axis)
    middle = jnp.sort(lax.stop_gradient(x), axis=None)[(x.size - 1) // 2]
    # The largest value not above: jnp.max shares the gradient among equal values and propagates NaN.
    return jnp.where(x > middle, -jnp.inf, x).max()


def norm(x: jax.Array, ord: float = 2.0, axis: int | None = None) -> jax.Array:
    """`torch.linalg.vector_norm`: (Σ|x|^ord)^(1/ord) of floating `x`, `ord` positive or infinite.

    The gradient of a zero vector and of a zero element is 0 (JAX: NaN for the vector; 1 or infinite for the element
    if `ord` is at most 1).

    >>> jax.grad(norm)(jnp.zeros(2)).tolist(), jax.grad(jnp.linalg.norm)(jnp.zeros(2)).tolist()
    ([0.0, 0.0], [nan, nan])
    """
    if ord == math.inf:
        return jnp.max(abs(x), axis)
    if ord == 1:
        return abs(x).sum(axis)
    if ord == 2:
        # A power, which autocast computes in float32, as it does PyTorch's norm: x * x would overflow in float16.
        return _root((x**2).sum(axis), 2)
    zero = x == 0
    powers = jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)) ** ord)
    return _root(powers.sum(axis), ord)


def std(x: jax.Array, axis: int | None = None, correction: int = 1) -> jax.Array:
    """`torch.std`: the root of Σ(x − mean)² / (n − correction) of floating `x`; the gradient of a constant is 0
    (JAX: NaN).

    >>> jax.grad(std)(jnp.ones(2)).tolist(), jax.grad(jnp.std)(jnp.ones(2)).tolist()
    ([0.0, 0.0], [nan, nan])
    """
    along = x.reshape(-1) if axis is None else x
    # Shifted by its first value, a constant has an exact mean and variance 0; the result does not change.
    shifted = along - lax.stop_gradient(lax.slice_in_dim(along, 0, 1, axis=axis or 0))
    return _root(jnp.var(shifted, axis or 0, ddof=correction), 2)


def cosine_similarity(a: jax.Array, b: jax.Array, axis: int = 1, eps: float = 1e-8) -> jax.Array:
    """`torch.nn.functional.cosine_similarity` of floating `a` and `b` of one shape: a·b / (‖a‖ ‖b‖), each norm at
    least `eps`, where the gradient ignores the bound.

    So the gradient at a zero vector is b / (eps ‖b‖), of the size of 1e8 (JAX's a·b / (‖a‖ ‖b‖): NaN).

    >>> cosine_similarity(jnp.zeros((1, 2)), jnp.ones((1, 2))).tolist()
    [0.0]
    """

    def unit(x: jax.Array) -> jax.Array:
        length = _root((x**2).sum(axis, keepdims=True), 2)
        # PyTorch clamps the norms in place, invisible to autograd (`aten/src/ATen/native/Distance.cpp`).
        return x / (length + lax.stop_gradient(jnp.maximum(length, eps) - length))

    return (unit(a) * unit(b)).sum(axis)


def atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    """`torch.atan2` of floating `y` and `x` of one shape: at the origin both gradients are 0 (JAX: NaN).

    >>> [float(g) for g in jax.grad(atan2, (0, 1))(0.0, 0.0)]
    [0.0, 0.0]
    """
    origin = (x == 0) & (y == 0)
    # The angle of the origin depends on the zeros' signs.
    angle = lax.stop_gradient(jnp.arctan2(y, x))
    return jnp.where(origin, angle, jnp.arctan2(jnp.where(origin, 1, y), jnp.where(origin, 1, x)))


def pow(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """`torch.pow`: x to the power y, floating, of one shape or one of them a Python number; of 0 to the power 0, which
    is 1, both gradients are 0 (JAX: NaN for x).

    >>> [float(g) for g in jax.grad(pow, (0, 1))(0.0, 0.0)]
    [0.0, 0.0]
    """
    origin = jnp.equal(x, 0) & jnp.equal(y, 0)
    return jnp.where(origin, 1, jnp.power(jnp.where(origin, 1, x), y))


def _root(total: jax.Array, order: float) -> jax.Array:
    """Return total^(1/order), with gradient 0 at 0, where the root of 1 is differentiated instead."""
    zero = total == 0
    positive = jnp.where(zero, 1, total)
    return jnp.where(zero, 0, jnp.sqrt(positive) if order == 2 else positive ** (1 / order))


def _take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jnp.take_along_axis(x, index, axis).squeeze(axis)
