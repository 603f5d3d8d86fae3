"""Elementwise operations. Their arrays arrive in PyTorch's promoted dtype.

At kinks the gradients are PyTorch's (`derivatives.yaml`): what JAX differentiates otherwise comes from
`jaxtrain.losses.subgradients`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from jaxtrain.losses import subgradients
from jaxtrain.torch_import.ops import ties
from jaxtrain.torch_import.ops.table import as_kernel, broadcast, in_opmath, op, ops

ops(
    {
        "neg.default": operator.neg,
        "positive.default": operator.pos,
        "reciprocal.default": lambda x: 1 / x,
        "square.default": jnp.square,
        "sqrt.default": jnp.sqrt,
        "exp.default": jnp.exp,
        "exp2.default": jnp.exp2,
        "expm1.default": jnp.expm1,
        "log.default": jnp.log,
        "log2.default": jnp.log2,
        "log10.default": jnp.log10,
        "log1p.default": jnp.log1p,
        "sin.default": jnp.sin,
        "cos.default": jnp.cos,
        "tan.default": jnp.tan,
        "asin.default": jnp.arcsin,
        "acos.default": jnp.arccos,
        "atan.default": jnp.arctan,
        "sinh.default": jnp.sinh,
        "cosh.default": jnp.cosh,
        "tanh.default": jnp.tanh,
        "asinh.default": jnp.arcsinh,
        "acosh.default": jnp.arccosh,
        "atanh.default": jnp.arctanh,
        # JAX 0.12 has 0 at infinity.
        "sinc.default": lambda x: jnp.where(jnp.isinf(x), jnp.nan, jnp.sinc(x)),
        "erf.default": lax.erf,
        "erfc.default": lax.erfc,
        "erfinv.default": lax.erf_inv,
        "sign.default sgn.default": lambda x: jnp.where(jnp.isnan(x), 0, jnp.sign(x)),
        "floor.default": jnp.floor,
        "ceil.default": jnp.ceil,
        "trunc.default fix.default": jnp.trunc,
        "frac.default": lambda x: x - lax.stop_gradient(jnp.trunc(x)),
        "round.default": jnp.round,
        "abs.default": lambda x: subgradients.abs(x) if _is_real(x) else jnp.abs(x),
        "isnan.default": jnp.isnan,
        "isinf.default": jnp.isinf,
        "isfinite.default": jnp.isfinite,
        "isposinf.default": jnp.isposinf,
        "isneginf.default": jnp.isneginf,
        "signbit.default": jnp.signbit,
        "logical_not.default": jnp.logical_not,
        "bitwise_not.default": jnp.invert,
        "sigmoid.default": jax.nn.sigmoid,
        "relu.default": jax.nn.relu,
        "silu.default": jax.nn.silu,
        "log_sigmoid.default": in_opmath(jax.nn.log_sigmoid),
        "mish.default": in_opmath(lambda x: x * jnp.tanh(jax.nn.softplus(x))),
        "relu6.default": lambda x: subgradients.hardtanh(x, 0.0, 6.0),
        "hardtanh.default": subgradients.hardtanh,
        "leaky_relu.default": subgradients.leaky_relu,
        "deg2rad.default": jnp.deg2rad,
        "rad2deg.default": jnp.rad2deg,
        "eq.Tensor eq.Scalar": operator.eq,
        "ne.Tensor ne.Scalar": operator.ne,
        "lt.Tensor lt.Scalar": operator.lt,
        "le.Tensor le.Scalar": operator.le,
        "gt.Tensor gt.Scalar": operator.gt,
        "ge.Tensor ge.Scalar": operator.ge,
        "logical_and.default": jnp.logical_and,
        "logical_or.default": jnp.logical_or,
        "logical_xor.default": jnp.logical_xor,
        "bitwise_and.Tensor bitwise_and.Scalar __and__.Tensor __and__.Scalar": jnp.bitwise_and,
        "bitwise_or.Tensor bitwise_or.Scalar __or__.Tensor __or__.Scalar": jnp.bitwise_or,
        "bitwise_xor.Tensor bitwise_xor.Scalar __xor__.Tensor __xor__.Scalar": jnp.bitwise_xor,
        "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar __lshift__.Scalar": jnp.left_shift,
        "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __rshift__.Scalar": jnp.right_shift,
        "mul.Tensor mul.Scalar": broadcast(
            lambda x, y: jnp.logical_and(x, y) if _is_bool(x) and _is_bool(y) else x * y
        ),
        "maximum.default max.other": jnp.maximum,
        "minimum.default min.other": jnp.minimum,
        "atan2.default": lambda y, x: subgradients.atan2(*jnp.broadcast_arrays(y, x)),
        "fmod.Tensor fmod.Scalar": jnp.fmod,
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": jnp.remainder,
        "ldexp.Tensor": lambda x, exponent: x * 2.0**exponent,
        "addcmul.default": lambda x, a, b, value=1: x + value * a * b,
        "addcdiv.default": lambda x, a, b, value=1: x + value * a / b,
    }
)


@op("rsqrt.default")
@jax.custom_jvp
def rsqrt(x: jax.Array) -> jax.Array:
    """1 / sqrt(x), whose gradient at -0 is +inf, as in PyTorch: its cube is negative (JAX: -inf)."""
    return lax.rsqrt(x)


rsqrt.defjvps(lambda tangent, ans, x: tangent * -0.5 * lax.integer_pow(ans, 3))


def _is_real(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or getattr(x, "dtype", None) == jnp.bool_


def _scaled(y: Any, alpha: Any) -> Any:
    return y if not isinstance(alpha, jax.Array) and alpha == 1 else alpha * y


@op("add.Tensor", "add.Scalar")
@broadcast
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha * y, of two bools their disjunction."""
    if _is_bool(x) and _is_bool(y):
        return jnp.logical_or(x, y)
    return x + _scaled(y, alpha)


@op("sub.Tensor", "sub.Scalar")
@broadcast
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """x - alpha * y."""
    return x - _scaled(y, alpha)


@op("rsub.Tensor", "rsub.Scalar")
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """y - alpha * x."""
    return sub(y, x, alpha)


@op("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
@broadcast
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """x / y, rounded down ("floor") or towards zero ("trunc"): then without gradient, as in PyTorch."""
    if rounding_mode == "floor":
        return lax.stop_gradient(floor_divide(x, y))
    if rounding_mode == "trunc":
        return lax.stop_gradient(lax.div(*jnp.broadcast_arrays(x, y)) if _is_integer(x, y) else jnp.trunc(x / y))
    return x / y


@op("floor_divide.default", "floor_divide.Scalar")
def floor_divide(x: Any, y: Any) -> Any:
    """x / y rounded down; of floats divided by 0 their quotient."""
    if _is_integer(x, y):
        return jnp.floor_divide(x, y)
    return jnp.where(jnp.equal(y, 0), jnp.divide(x, y), jnp.floor_divide(x, y))


def _is_integer(*values: Any) -> bool:
    return all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in values)


@op("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def pow(x: Any, exponent: Any) -> Any:
    """x to a power. An integral exponent multiplies, as PyTorch's kernels for 2 and 3 do."""
    if isinstance(exponent, int | float):
        if exponent == 0.5:
            return jnp.sqrt(x)
        if exponent == -0.5:
            return rsqrt(x)
        return lax.integer_pow(x, int(exponent)) if float(exponent).is_integer() else jnp.power(x, exponent)
    return subgradients.pow(*jnp.broadcast_arrays(x, exponent))


@op("round.decimals")
def round_decimals(x: jax.Array, decimals: int = 0) -> jax.Array:
    """Round to a number of decimals."""
    return jnp.round(x, decimals)


@op("copysign.Tensor", "copysign.Scalar")
def copysign(x: Any, y: Any) -> jax.Array:
    """x with the sign of y, which has no gradient."""
    return _copysign(*jnp.broadcast_arrays(x, lax.stop_gradient(y)))


@jax.custom_jvp
def _copysign(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.copysign(x, y)


_copysign.defjvps(lambda tangent, ans, x, y: tangent * jnp.where(x == 0, 0, ans / x), None)


@op("hypot.default")
def hypot(x: jax.Array, y: jax.Array) -> jax.Array:
    """sqrt(x² + y²), whose gradient at the origin is NaN, as in PyTorch."""
    return _hypot(*jnp.broadcast_arrays(x, y))


@jax.custom_jvp
def _hypot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(jnp.isinf(x) | jnp.isinf(y), jnp.inf, jnp.hypot(x, y))


_hypot.defjvps(lambda tangent, ans, x, y: tangent * (x / ans), lambda tangent, ans, x, y: tangent * (y / ans))


def _log_of_sum(compute: Callable[..., jax.Array], exp: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `compute`, the logarithm of a sum of exponentials, with PyTorch's derivative."""
    computed = jax.custom_jvp(lambda x, y: compute(x, y))
    computed.defjvps(
        lambda tangent, _, x, y: tangent / (1 + exp(y - x)), lambda tangent, _, x, y: tangent / (1 + exp(x - y))
    )
    return computed


_logaddexp, _logaddexp2 = _log_of_sum(jnp.logaddexp, jnp.exp), _log_of_sum(jnp.logaddexp2, jnp.exp2)


@op("logaddexp.default")
def logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    """log(exp(x) + exp(y))."""
    return _logaddexp(*jnp.broadcast_arrays(x, y))


@op("logaddexp2.default")
def logaddexp2(x: jax.Array, y: jax.Array) -> jax.Array:
    """log2(2**x + 2**y)."""
    return _logaddexp2(*jnp.broadcast_arrays(x, y))


@op("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def xlogy(x: Any, y: Any) -> jax.Array:
    """x log(y), 0 where x is 0."""
    return _xlogy(*jnp.broadcast_arrays(x, y))


@jax.custom_jvp
def _xlogy(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(y), jnp.nan, special.xlogy(x, y))


_xlogy.defjvps(
    lambda tangent, _, x, y: tangent * jnp.where((x == 0) & (y <= 0), 0, jnp.log(y)),
    lambda tangent, _, x, y: tangent * (x / y),
)


@op("special_xlog1py.default", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar")
def xlog1py(x: Any, y: Any) -> jax.Array:
    """x log(1 + y), 0 where x is 0."""
    return _xlog1py(*jnp.broadcast_arrays(x, y))


@jax.custom_jvp
def _xlog1py(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(y), jnp.nan, special.xlog1py(x, y))


_xlog1py.defjvps(
    lambda tangent, _, x, y: tangent * jnp.where((x == 0) & (y <= -1), 0, jnp.log1p(y)),
    lambda tangent, _, x, y: tangent * (x / (y + 1)),
)


@op("lerp.Scalar", "lerp.Tensor")
def lerp(x: jax.Array, end: jax.Array, weight: Any) -> jax.Array:
    """x + weight * (end - x), from the nearer end."""
    return _lerp(*jnp.broadcast_arrays(x, end, jnp.asarray(weight, x.dtype)))


@jax.custom_jvp
def _lerp(x: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    distance = end - x
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * distance, end - distance * (1 - weight))


_lerp.defjvps(
    lambda tangent, _, x, end, weight: tangent * (1 - weight),
    lambda tangent, _, x, end, weight: tangent * weight,
    lambda tangent, _, x, end, weight: tangent * (end - x),
)


@op("clamp.default", "clamp.Tensor", "clip.default", "clip.Tensor", "clamp_min.default", "clamp_min.Tensor")
def clamp(x: jax.Array, min: Any = None, max: Any = None, shared_ties: bool = False) -> jax.Array:
    """Bound x below and above."""
    return ties.clamp(x, min, max) if shared_ties else subgradients.clamp(x, min, max)


@op("clamp_max.default", "clamp_max.Tensor")
def clamp_max(x: jax.Array, max: Any, shared_ties: bool = False) -> jax.Array:
    """Bound x above."""
    return clamp(x, None, max, shared_ties)


@op("fmax.default")
def fmax(x: jax.Array, y: jax.Array, shared_ties: bool = False) -> jax.Array:
    """Return the larger element, or the one that is not NaN; the first of equal ones has the gradient."""
    return ties.fmax(x, y) if shared_ties else jnp.where((x >= y) | jnp.isnan(y), x, y)


@op("fmin.default")
def fmin(x: jax.Array, y: jax.Array, shared_ties: bool = False) -> jax.Array:
    """Return the smaller element, or the one that is not NaN; the first of equal ones has the gradient."""
    return ties.fmin(x, y) if shared_ties else jnp.where((x <= y) | jnp.isnan(y), x, y)


@op("gelu.default")
def gelu(x: jax.Array, approximate: str = "none") -> jax.Array:
    """GELU, exact or by tanh."""
    activated: jax.Array = as_kernel(jax.nn.gelu, x, approximate=approximate == "tanh")
    return activated


@jax.custom_jvp
def _expm1(x: jax.Array) -> jax.Array:
    return jnp.expm1(x)


# JAX's derivative, expm1(x) + 1, has no correct digit for very negative x.
_expm1.defjvps(lambda tangent, _, x: tangent * jnp.exp(x))


@op("elu.default")
@in_opmath
def elu(x: jax.Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> jax.Array:
    """ELU; `selu` and `celu` are special cases of it."""
    negative = _expm1(jnp.where(x > 0, 0, x) * input_scale)
    return scale * jnp.where(x > 0, x, alpha * negative)


@op("celu.default")
@in_opmath
def celu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    """CELU."""
    return elu(x, alpha, 1, 1 / alpha)


@op("selu.default")
@in_opmath
def selu(x: jax.Array) -> jax.Array:
    """SELU (Klambauer et al. 2017)."""
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@op("softplus.default")
@in_opmath
def softplus(x: jax.Array, beta: float = 1, threshold: float = 20) -> jax.Array:
    """Softplus, linear above the threshold."""
    linear = x * beta > threshold
    return jnp.where(linear, x, jax.nn.softplus(jnp.where(linear, 0, x) * beta) / beta)


@op("hardsigmoid.default")
def hardsigmoid(x: jax.Array) -> jax.Array:
    """Hard sigmoid, with gradient 0 at both kinks.

    The slope between them is one sixth in float32, also in float64, as in `aten/src/ATen/native/cpu/Activation.cpp`.
    """
    slope = float(np.float32(1 / 6))
    inside = x * slope + lax.stop_gradient(x / 6 - x * slope) + 0.5
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, inside))


@op("hardswish.default")
@in_opmath
def hardswish(x: jax.Array) -> jax.Array:
    """Hard swish, with the gradients 0 and 1 at its kinks."""
    return _hardswish(x)


@jax.custom_jvp
def _hardswish(x: jax.Array) -> jax.Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


_hardswish.defjvps(
    lambda tangent, _, x: tangent * jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, jnp.clip(x, -3, 3) / 3 + 0.5))
)


@op("hardshrink.default")
def hardshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    """Set values within ±lambd to 0."""
    return jnp.where((x >= -lambd) & (x <= lambd), 0, x)


@op("softshrink.default")
def softshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    """Move values towards 0 by lambd."""
    # A NaN stays one.
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, lax.stop_gradient(x) * 0))


@op("threshold.default")
def threshold(x: jax.Array, threshold: float, value: float) -> jax.Array:
    """Replace values up to the threshold."""
    return jnp.where(x <= threshold, value, x)


@op("logit.default")
@in_opmath
def logit(x: jax.Array, eps: float | None = None) -> jax.Array:
    """log(x / (1 - x)), of x bounded to [eps, 1 - eps]."""
    return _logit(x if eps is None else subgradients.clamp(x, eps, 1 - eps))


@jax.custom_jvp
def _logit(x: jax.Array) -> jax.Array:
    return special.logit(x)


_logit.defjvps(lambda tangent, _, x: tangent / jnp.where((x < 0) | (x > 1), jnp.nan, jnp.abs(x * (1 - x))))


@op("nan_to_num.default")
def nan_to_num(
    x: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    """Replace NaN and infinities."""
    return _nan_to_num(nan or 0.0, posinf, neginf, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _nan_to_num(nan: float, posinf: float | None, neginf: float | None, x: jax.Array) -> jax.Array:
    return jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


@_nan_to_num.defjvp
def _nan_to_num_jvp(
    nan: float, posinf: float | None, neginf: float | None, primals: tuple[jax.Array], tangents: tuple[Any]
) -> tuple[jax.Array, Any]:
    (x,), (tangent,) = primals, tangents
    # A product, by which NaN stays NaN.
    return _nan_to_num(nan, posinf, neginf, x), jnp.where(jnp.isfinite(x), tangent, tangent * 0)


@op("heaviside.default")
def heaviside(x: jax.Array, values: jax.Array) -> jax.Array:
    """The step function."""
    return jnp.where(x == 0, values, (x > 0).astype(x.dtype))


@op("where.self", "where.Scalar", "where.ScalarSelf", "where.ScalarOther")
@broadcast
def where(condition: jax.Array, x: Any, y: Any) -> jax.Array:
    """Select by a condition."""
    return jnp.where(condition, x, y)


@op("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    """Replace the elements where the mask is true."""
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


@op("_prelu_kernel.default")
def prelu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """PReLU, its weight broadcast to x."""
    return subgradients.leaky_relu(x, weight)


@op("glu.default")
@in_opmath
def glu(x: jax.Array, dim: int = -1) -> jax.Array:
    """Half of x times the sigmoid of the other half."""
    a, b = jnp.split(x, 2, dim)
    return a * jax.nn.sigmoid(b)


@op("complex.default")
def complex_(real: jax.Array, imag: jax.Array) -> jax.Array:
    """Complex numbers by their parts."""
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@op("polar.default")
def polar(magnitude: jax.Array, angle: jax.Array) -> jax.Array:
    """Complex numbers by magnitude and angle. The gradient of the magnitude is that of its absolute value."""
    magnitude, angle = _polar_operands(*jnp.broadcast_arrays(magnitude, angle))
    return lax.complex(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))


@jax.custom_jvp
def _polar_operands(magnitude: jax.Array, angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    return magnitude, angle


@_polar_operands.defjvp
def _polar_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # PyTorch's are products with x / |x| and with x · i, which are NaN for an infinite x.
    one = jnp.where(jnp.isinf(primals[0]), jnp.nan, 1)
    return primals, (tangents[0] * one * jnp.sign(primals[0]), tangents[1] * one)


@op("special_entr.default")
def entr(x: jax.Array) -> jax.Array:
    """-x log(x)."""
    return special.entr(x)


@op("kept.default", library="jaxtrain")
def kept(x: jax.Array) -> jax.Array:
    """The same numbers, which XLA does not combine with what follows (`rewrites.kept_roundings`)."""
    return lax.optimization_barrier(x)
