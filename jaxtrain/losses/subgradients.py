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
    """Absolute value, as `torch.abs`.

    The gradient at 0 is 0 (JAX: 1).

    Args:
      x: float[...].

    Returns:
      float[...], of the dtype of `x`.

    Example:
      >>> float(jax.grad(abs)(0.0)), float(jax.grad(jnp.abs)(0.0))
      (0.0, 1.0)

    References:
      `abs` in PyTorch's `derivatives.yaml`.
    """
    return _abs(x)


@jax.custom_jvp
def _abs(x: jax.Array) -> jax.Array:
    return jnp.abs(x)


# A product, by which NaN stays NaN also at 0.
_abs.defjvps(lambda tangent, _, x: tangent * jnp.where(jnp.isnan(x), 0, jnp.sign(x)))


def clamp(x: jax.Array, min: ArrayLike | None = None, max: ArrayLike | None = None) -> jax.Array:
    """Bound `x` below and above, as `torch.clamp`; where `min` exceeds `max`, the result is `max`.

    At a bound the gradient with respect to `x` is 1 (JAX: 0.5).

    Args:
      x: float[...].
      min: Lower bound, a scalar or an array of the rank and dtype of `x`; None for no bound.
      max: Upper bound, likewise.

    Returns:
      float[...], of the dtype of `x`.

    Example:
      >>> float(jax.grad(clamp)(1.0, max=1.0)), float(jax.grad(jnp.clip)(1.0, max=1.0))
      (1.0, 0.5)

    References:
      `clamp_backward` and `clamp_backward_min_max` in PyTorch's `FunctionsManual.cpp`.
    """
    if min is None or max is None:
        bounded = x if min is None else jnp.where(_or_nan(x < min, min), min, x)
        return bounded if max is None else jnp.where(_or_nan(bounded > max, max), max, bounded)
    # If the bounds are equal, PyTorch gives neither of them the gradient of an x below.
    least = jnp.where(jnp.less(min, max), min, lax.stop_gradient(min))
    above = _or_nan((x > max) | jnp.less(max, min), max)
    bounded = jnp.where(above, max, jnp.where(x < min, least, x))
    return jnp.where(jnp.isnan(min), min, bounded) if isinstance(min, jax.Array) else bounded


def _or_nan(condition: jax.Array, bound: ArrayLike) -> jax.Array:
    """Return where a condition holds or a bound is NaN, if it is an array."""
    return condition | jnp.isnan(bound) if isinstance(bound, jax.Array) else condition


def hardtanh(x: jax.Array, min_val: float = -1.0, max_val: float = 1.0) -> jax.Array:
    """Bound `x` by two numbers, as `torch.nn.functional.hardtanh`.

    At the bounds the gradient is 0 (JAX: 1).

    Args:
      x: float[...].
      min_val: Lower bound.
      max_val: Upper bound.

    Returns:
      float[...], of the dtype of `x`.

    Example:
      >>> float(jax.grad(hardtanh)(1.0)), float(jax.grad(jax.nn.hard_tanh)(1.0))
      (0.0, 1.0)

    References:
      `hardtanh` in PyTorch's `derivatives.yaml`.
    """
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


def leaky_relu(x: jax.Array, negative_slope: ArrayLike = 0.01) -> jax.Array:
    """Leaky ReLU, as `torch.nn.functional.leaky_relu`, or `prelu` if the slope is an array.

    At 0 the gradient with respect to `x` is the slope (JAX: 1).

    Args:
      x: float[...].
      negative_slope: Factor of negative values, a scalar or an array that broadcasts to the shape of `x`.

    Returns:
      float[...], of the dtype of `x`.

    Example:
      >>> round(float(jax.grad(leaky_relu)(0.0)), 2), float(jax.grad(jax.nn.leaky_relu)(0.0))
      (0.01, 1.0)

    References:
      `leaky_relu` and `_prelu_kernel` in PyTorch's `derivatives.yaml`.
    """
    return x * jnp.where(x > 0, 1, negative_slope)


def max(x: jax.Array, axis: int) -> jax.Array:
    """Maximum along an axis, as `torch.max(x, axis).values`.

    The first of equal maxima receives the whole gradient (JAX: they share it). `torch.max(x)` and `torch.amax` share
    it too: `jnp.max` has their gradient.

    Args:
      x: float[...].
      axis: Axis to reduce.

    Returns:
      The shape of `x` without `axis`, of the dtype of `x`.

    Example:
      >>> jax.grad(max)(jnp.array([3.0, 1.0, 3.0]), 0).tolist()
      [1.0, 0.0, 0.0]

    References:
      `max.dim` in PyTorch's `derivatives.yaml`.
    """
    return _take(x, jnp.argmax(x, axis, keepdims=True), axis)


def min(x: jax.Array, axis: int) -> jax.Array:
    """Minimum along an axis, as `torch.min(x, axis).values`.

    The first of equal minima receives the whole gradient (JAX: they share it).

    Args:
      x: float[...].
      axis: Axis to reduce.

    Returns:
      The shape of `x` without `axis`, of the dtype of `x`.

    Example:
      >>> jax.grad(min)(jnp.array([3.0, 1.0, 1.0]), 0).tolist()
      [0.0, 1.0, 0.0]

    References:
      `min.dim` in PyTorch's `derivatives.yaml`.
    """
    return _take(x, jnp.argmin(x, axis, keepdims=True), axis)


def median(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Median, as `torch.median`: of an even number of values the lower of the middle two (JAX: their mean).

    Along an axis, the selected value receives the gradient; among equal values, it is the one that a stable sort puts
    in the middle. Over all of `x`, equal values share the gradient.

    Args:
      x: float[...].
      axis: Axis to reduce; None for all.

    Returns:
      The shape of `x` without `axis`, or a scalar, of the dtype of `x`.

    Example:
      >>> float(median(jnp.array([3.0, 1.0, 4.0, 2.0]))), float(jnp.median(jnp.array([3.0, 1.0, 4.0, 2.0])))
      (2.0, 2.5)

    References:
      `median` and `median.dim` in PyTorch's `derivatives.yaml`.
    """
    if axis is not None:
        middle = jnp.take(jnp.argsort(x, axis), jnp.array([(x.shape[axis] - 1) // 2]), axis)
        first_nan = jnp.argmax(jnp.isnan(x), axis, keepdims=True)
        return _take(x, jnp.where(jnp.isnan(x).any(axis, keepdims=True), first_nan, middle), axis)
    middle = jnp.sort(lax.stop_gradient(x), axis=None)[(x.size - 1) // 2]
    # The largest value not above: jnp.max shares the gradient among equal values and propagates NaN.
    return jnp.where(x > middle, -jnp.inf, x).max()


def norm(x: jax.Array, ord: float = 2.0, axis: int | None = None) -> jax.Array:
    """Vector norm (Σ|x|^ord)^(1/ord), as `torch.linalg.vector_norm`.

    The gradient of a zero vector and of a zero element is 0 (JAX: NaN for the vector; 1 or infinite for the element
    if `ord` is at most 1).

    Args:
      x: float[...].
      ord: Order of the norm, positive or infinite.
      axis: Axis to reduce; None for all.

    Returns:
      The shape of `x` without `axis`, or a scalar, of the dtype of `x`.

    Example:
      >>> jax.grad(norm)(jnp.zeros(2)).tolist(), jax.grad(jnp.linalg.norm)(jnp.zeros(2)).tolist()
      ([0.0, 0.0], [nan, nan])

    References:
      `linalg_vector_norm_backward` in PyTorch's `FunctionsManual.cpp`.
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
    """Standard deviation, the root of Σ(x − mean)² / (n − correction), as `torch.std`.

    The gradient of a constant is 0 (JAX: NaN).

    Args:
      x: float[...].
      axis: Axis to reduce; None for all.
      correction: Subtracted from the number of values; 1 gives the unbiased variance.

    Returns:
      The shape of `x` without `axis`, or a scalar, of the dtype of `x`.

    Example:
      >>> jax.grad(std)(jnp.ones(2)).tolist(), jax.grad(jnp.std)(jnp.ones(2)).tolist()
      ([0.0, 0.0], [nan, nan])

    References:
      `std_backward` in PyTorch's `FunctionsManual.cpp`.
    """
    along = x.reshape(-1) if axis is None else x
    # Shifted by its first value, a constant has an exact mean and variance 0; the result does not change.
    shifted = along - lax.stop_gradient(lax.slice_in_dim(along, 0, 1, axis=axis or 0))
    return _root(jnp.var(shifted, axis or 0, ddof=correction), 2)


def cosine_similarity(a: jax.Array, b: jax.Array, axis: int = 1, eps: float = 1e-8) -> jax.Array:
    """Cosine similarity a·b / (‖a‖ ‖b‖), as `torch.nn.functional.cosine_similarity`.

    Each norm is at least `eps`, and the gradient ignores this bound: at a zero vector it is b / (eps ‖b‖), about 1e8
    (JAX's a·b / (‖a‖ ‖b‖): NaN).

    Args:
      a: float[...].
      b: float[...], of the shape of `a`.
      axis: Axis to reduce.
      eps: Least norm.

    Returns:
      The shape of `a` without `axis`, of the dtype of `a` and `b`.

    Example:
      >>> cosine_similarity(jnp.zeros((1, 2)), jnp.ones((1, 2))).tolist()
      [0.0]

    References:
      `cosine_similarity` in PyTorch's `aten/src/ATen/native/Distance.cpp`.
    """

    def unit(x: jax.Array) -> jax.Array:
        length = _root((x**2).sum(axis, keepdims=True), 2)
        # PyTorch clamps the norms in place, invisible to autograd (`aten/src/ATen/native/Distance.cpp`).
        return x / (length + lax.stop_gradient(jnp.maximum(length, eps) - length))

    return (unit(a) * unit(b)).sum(axis)


def atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    """Angle of the point (x, y), as `torch.atan2`.

    At the origin both gradients are 0 (JAX: NaN).

    Args:
      y: float[...].
      x: float[...], of the shape of `y`.

    Returns:
      float[...], in radians, of the dtype of `y` and `x`.

    Example:
      >>> [float(g) for g in jax.grad(atan2, (0, 1))(0.0, 0.0)]
      [0.0, -0.0]

    References:
      `atan2_backward` in PyTorch's `FunctionsManual.cpp`.
    """
    return _atan2(y, x)


@jax.custom_jvp
def _atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.arctan2(y, x)


def _over_square(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a / (a² + b²), 0 for the origin."""
    origin = (a == 0) & (b == 0)
    return jnp.where(origin, 0, a / jnp.where(origin, 1, a * a + b * b))


_atan2.defjvps(
    lambda tangent, _, y, x: tangent * _over_square(x, y), lambda tangent, _, y, x: -tangent * _over_square(y, x)
)


def pow(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """x to the power y, as `torch.pow`.

    0 to the power 0 is 1, and both of its gradients are 0 (JAX: NaN for x).

    Args:
      x: float[...], or a Python number.
      y: float[...], of the shape of `x`, or a Python number.

    Returns:
      float[...].

    Example:
      >>> [float(g) for g in jax.grad(pow, (0, 1))(0.0, 0.0)]
      [0.0, 0.0]

    References:
      `pow_backward_self` and `pow_backward_exponent` in PyTorch's `FunctionsManual.cpp`.
    """
    dtype = jnp.result_type(x, y)
    return _pow(jnp.asarray(x, dtype), jnp.asarray(y, dtype))


@jax.custom_jvp
def _pow(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.power(x, y)


_pow.defjvps(
    lambda tangent, _, x, y: tangent * jnp.where(y == 0, 0, y * jnp.power(x, y - 1)),
    lambda tangent, power, x, y: tangent * jnp.where((x == 0) & (y >= 0), 0, power * jnp.log(x)),
)


def _root(total: jax.Array, order: float) -> jax.Array:
    """Return total^(1/order), with gradient 0 at 0, where the root of 1 is differentiated instead."""
    zero = total == 0
    positive = jnp.where(zero, 1, total)
    return jnp.where(zero, 0, jnp.sqrt(positive) if order == 2 else positive ** (1 / order))


def _take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jnp.take_along_axis(x, index, axis).squeeze(axis)
