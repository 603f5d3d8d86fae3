"""Special functions. Their arrays arrive in PyTorch's promoted dtype."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from jaxtrain.losses import subgradients
from jaxtrain.torch_import.ops.table import in_opmath, op, ops, with_gradient

Recurrence = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
"""From (k, x, the polynomial of degree k - 1, that of degree k) to that of degree k + 1."""

ops(
    {
        "special_i0e.default": special.i0e,
        "special_i1.default": special.i1,
        "special_i1e.default": special.i1e,
        "special_log_ndtr.default": special.log_ndtr,
        "special_zeta.default special_zeta.other_scalar special_zeta.self_scalar": special.zeta,
        "igamma.default": special.gammainc,
        "igammac.default": special.gammaincc,
        # PyTorch has no gradient of these.
        "special_modified_bessel_i0.default": lambda x: special.i0(lax.stop_gradient(x)),
        "special_modified_bessel_i1.default": lambda x: special.i1(lax.stop_gradient(x)),
        "special_spherical_bessel_j0.default": lambda x: jnp.where(
            jnp.isinf(x), 0, jnp.sinc(lax.stop_gradient(x) / jnp.pi)
        ),
    }
)


@op("special_erfcx.default")
@jax.custom_jvp
def erfcx(x: jax.Array) -> jax.Array:
    """exp(x²) erfc(x), with the gradient by PyTorch's formula, which is NaN at infinity (`derivatives.yaml`)."""
    return special.erfcx(x)


erfcx.defjvps(lambda tangent, y, x: tangent * (2 * x * y - 2 / math.sqrt(math.pi)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def polygamma(n: int, x: jax.Array) -> jax.Array:
    """The n-th derivative of the digamma function."""
    if n == 0:
        return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))
    # XLA's zeta function is right for positive numbers: ψ(x) = ψ(x + m) - (-1)ⁿ n! Σ 1 / (x + k)ⁿ⁺¹, k < m.
    steps = jnp.where(jnp.isfinite(x), jnp.clip(jnp.ceil(-x), 0, 1000), 0)
    total = lax.fori_loop(
        0,
        jnp.max(steps, initial=0).astype(int),
        lambda k, total: total + jnp.where(k < steps, 1 / jnp.where(k < steps, x + k, 1) ** (n + 1), 0),
        jnp.zeros_like(x),
    )
    value = lax.polygamma(jnp.full_like(x, n), x + steps) - (-1) ** n * math.factorial(n) * total
    pole = (x <= 0) & (x == jnp.floor(x))
    return jnp.where(pole, jnp.inf if n % 2 else -jnp.inf, jnp.where(jnp.isposinf(x), 0, value))


@polygamma.defjvp
def _polygamma_jvp(n: int, primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    return polygamma(n, *primals), tangents[0] * polygamma(n + 1, *primals)


op("polygamma.default")(in_opmath(polygamma))


@op("lgamma.default")
@jax.custom_jvp
def lgamma(x: jax.Array) -> jax.Array:
    """The logarithm of the absolute value of the gamma function."""
    return lax.lgamma(x)


lgamma.defjvps(lambda tangent, _, x: tangent * polygamma(0, x))


@op("special_ndtri.default")
@jax.custom_jvp
def ndtri(x: jax.Array) -> jax.Array:
    """The inverse of the normal distribution function."""
    return special.ndtri(x)


ndtri.defjvps(lambda tangent, y, _: tangent * math.sqrt(2 * math.pi) * jnp.exp(jnp.square(y) / 2))


@op("i0.default")
@jax.custom_jvp
def i0(x: jax.Array) -> jax.Array:
    """The modified Bessel function of order 0. JAX's own is not smooth at 0."""
    return special.i0(x)


i0.defjvps(lambda tangent, _, x: tangent * special.i1(x))


@op("digamma.default")
@in_opmath
def digamma(x: jax.Array) -> jax.Array:
    """The digamma function."""
    return polygamma(0, x)


@op("angle.default")
def angle(x: jax.Array) -> jax.Array:
    """The angle of complex numbers, with gradient 0 at 0; of negative numbers π."""
    if jnp.iscomplexobj(x):
        return subgradients.atan2(x.imag, x.real)
    return lax.stop_gradient(jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0)))


@op("frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mantissa and exponent."""
    mantissa, exponent = jnp.frexp(lax.stop_gradient(x))
    return with_gradient(mantissa, jnp.ldexp(x, -exponent)), exponent


@op("nextafter.default")
def nextafter(x: jax.Array, other: jax.Array) -> jax.Array:
    """The next number towards another one, with the gradient 1 where they differ."""
    return with_gradient(jnp.nextafter(*map(lax.stop_gradient, (x, other))), jnp.where(x == other, 0, x))


def _polynomial(first: Callable[[jax.Array], jax.Array], following: Recurrence) -> Callable[..., jax.Array]:
    """Return a family of orthogonal polynomials as a function of (x, degree), without gradient as in PyTorch."""

    def polynomial(x: Any, n: Any) -> jax.Array:
        """The polynomial of degree n, 0 for a negative one."""
        x, n = jnp.broadcast_arrays(*map(lax.stop_gradient, map(jnp.asarray, (x, n))))
        x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(n.dtype)
        degree = jnp.where(jnp.isfinite(n), jnp.trunc(n), -1).astype(int)

        def body(k: Any, values: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            before, now = values
            return jnp.where(k < degree, now, before), jnp.where(k < degree, following(k, x, before, now), now)

        last = jnp.max(degree, initial=0)
        value = lax.fori_loop(1, last, body, (jnp.ones_like(x), first(x)))[1]
        return jnp.where(degree < 0, 0, jnp.where(degree == 0, 1, value))

    return polynomial


def _chebyshev(k: Any, x: jax.Array, before: jax.Array, now: jax.Array) -> jax.Array:
    return 2 * x * now - before


def _shifted(recurrence: Recurrence) -> Recurrence:
    return lambda k, x, before, now: recurrence(k, 2 * x - 1, before, now)


_POLYNOMIALS: dict[str, tuple[Callable[[jax.Array], jax.Array], Recurrence]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "shifted_chebyshev_polynomial_t": (lambda x: 2 * x - 1, _shifted(_chebyshev)),
    "shifted_chebyshev_polynomial_u": (lambda x: 4 * x - 2, _shifted(_chebyshev)),
    "shifted_chebyshev_polynomial_v": (lambda x: 4 * x - 3, _shifted(_chebyshev)),
    "shifted_chebyshev_polynomial_w": (lambda x: 4 * x - 1, _shifted(_chebyshev)),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda k, x, before, now: 2 * x * now - 2 * k * before),
    "hermite_polynomial_he": (lambda x: x, lambda k, x, before, now: x * now - k * before),
    "laguerre_polynomial_l": (
        lambda x: 1 - x,
        lambda k, x, before, now: ((2 * k + 1 - x) * now - k * before) / (k + 1),
    ),
    "legendre_polynomial_p": (
        lambda x: x,
        lambda k, x, before, now: ((2 * k + 1) * x * now - k * before) / (k + 1),
    ),
}
for _name, _definition in _POLYNOMIALS.items():
    op(*(f"special_{_name}.{overload}" for overload in ("default", "x_scalar", "n_scalar")))(_polynomial(*_definition))
