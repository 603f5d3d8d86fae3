"""Histograms of magnitudes have exact counts of what a dtype's own conversion loses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.passes.numerics.exponents import BASE, bounds, count_from, rounding_limits
from jaxtrain.step.lost_values import Magnitudes


def counted(x, dtype):
    """Return the number of elements of an array from each bound on."""
    high, low = np.asarray(jax.jit(count_from, static_argnums=1)(x, dtype), np.int64)
    return dict(zip(bounds(dtype), (high * BASE + low).tolist(), strict=True))


def classes(x, dtype):
    """Return the numbers of zeros, underflows, subnormal numbers, normal numbers, overflows and NaNs by NumPy."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(dtype).astype(np.float64)
    wide, tiny = np.abs(x.astype(np.float64)), float(jnp.finfo(dtype).smallest_normal)
    nan, overflow = np.isnan(wide), ~np.isfinite(rounded) & ~np.isnan(wide)
    kept = ~nan & ~overflow & (rounded != 0)
    underflow = (rounded == 0) & (wide != 0)
    subnormal = kept & (np.abs(rounded) < tiny)
    return [int(kind.sum()) for kind in (wide == 0, underflow, subnormal, kept & ~subnormal, overflow, nan)]


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_counts_are_those_of_numpys_conversion(dtype):
    rng = np.random.default_rng(0)
    limits = rounding_limits(dtype)
    # Every float32 beside a limit, numbers of all exponents, and the special ones.
    beside = np.concatenate([np.arange(bound - 3, bound + 4) for bound in limits]).astype(np.int32).view(np.float32)
    spread = (rng.standard_normal(20_000) * 2.0 ** rng.integers(-149, 128, 20_000)).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-133], np.float32)
    x = np.concatenate([beside, -beside, spread, special])
    from_bound = counted(jnp.asarray(x).reshape(7, -1) if len(x) % 7 == 0 else jnp.asarray(x), dtype)
    chain = [from_bound[bound] for bound in (0, 1, *limits, max(bounds(dtype)))]
    assert [a - b for a, b in zip(chain, [*chain[1:], 0], strict=True)] == classes(x, dtype)
    exponents = np.frexp(np.abs(x[np.isfinite(x)].astype(np.float64)))[1] - 1
    at_least = [from_bound[int(np.float32(2.0**e).view(np.int32))] for e in (-20, 4)]
    infinite = 3
    assert at_least == [int(((exponents >= e) & (x[np.isfinite(x)] != 0)).sum()) + infinite for e in (-20, 4)]


def test_the_limits_of_float16_are_the_published_ones():
    nonzero, normal, overflow = np.array(rounding_limits(np.float16), np.int32).view(np.float32).tolist()
    # 2^-25 is halfway between 0 and the smallest subnormal number 2^-24, and is rounded to even; 65520 halfway from
    # 65504 to 65536.
    assert nonzero == np.nextafter(np.float32(2.0**-25), np.float32(1))
    assert normal == 2.0**-14 - 2.0**-25
    assert overflow == 65520


def test_counts_of_more_than_2_31_elements_do_not_overflow(monkeypatch):
    monkeypatch.setattr("jaxtrain.passes.numerics.exponents._MOST", 100)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 4000)), jnp.float32)
    found = counted(x, np.float16)
    monkeypatch.undo()
    assert found == counted(x + 0, np.float16)
    assert found[0] == x.size


@pytest.mark.parametrize("scale", [2.0**-33, 2.0**-18, 1e-3, 1.0, 300.0, 1e6])
def test_exponents_are_those_of_the_largest_magnitude_and_of_the_least_beyond_a_hundredth(scale):
    x = scale * np.random.default_rng(0).standard_normal(1000)
    magnitudes = np.sort(np.abs(x))
    low, high = Magnitudes.of("float16", count_from(jnp.asarray(x, np.float32), np.float16)).exponents
    # They are ends of intervals of up to two octaves; the last is open.
    assert low <= np.log2(magnitudes[10]) < low + 3
    assert 0 <= high - np.log2(magnitudes[-1]) < (3 if magnitudes[-1] < 2**16 else 128)
