"""Rotary position embeddings (Su et al. 2021), with the scalings that extend models to longer contexts.

Formulas and constants are those of `transformers.modeling_rope_utils`. Frequencies are always computed in float32 and
in its order of operations, because models were trained with their rounding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError

TYPES = ("default", "linear", "llama3", "yarn")
"""Scalings: none; interpolated positions (Chen et al. 2023); low frequencies only (Llama 3.1); by frequency band, with
a temperature (YaRN, Peng et al. 2023)."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of rotary embeddings, with the field names of `rope_parameters` in a Hugging Face config.

    Attributes:
      rope_theta: Base of the wavelengths.
      rope_type: One of `TYPES`.
      factor: Factor by which the context is extended.
      original_max_position_embeddings: Context before the extension, in tokens.

    Raises:
      UserError: The scaling is unknown or lacks a parameter.
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }
        if self.rope_type not in needed:
            raise UserError(f"rope_type {self.rope_type!r} is not supported: choose one of {', '.join(TYPES)}")
        for name in needed[self.rope_type]:
            if getattr(self, name) is None:
                raise UserError(f"rope_type {self.rope_type!r} needs {name}: set it in rope_parameters")

    @property
    def magnitude(self) -> float:
        """Factor of sines and cosines: the temperature of YaRN, 1 for the other scalings."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angular frequencies in radians per token, float32 [head_dim / 2].

        Example:
          >>> Rope(rope_type="linear", factor=2.0).frequencies(4).tolist() == [0.5, np.float32(0.005)]
          True
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        # Powers in float64, then rounded, are closer to PyTorch's than NumPy's float32 powers.
        wavelengths = np.power(np.float64(self.rope_theta), exponents).astype(np.float32)
        return _SCALED[self.rope_type](self, wavelengths, head_dim)


DEFAULT = Rope()
"""The paper's: base 10000, no scaling."""


def rotary_cos_sin(
    rope: Rope, positions: jax.Array | np.ndarray, head_dim: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of the rotation angles, [B, T, 1, head_dim / 2] each, for positions [B, T].

    They are computed in float32 at least and returned in `dtype`.
    """
    frequencies = rope.frequencies(head_dim).astype(np.promote_types(dtype, np.float32))
    angles = positions[:, :, None, None].astype(frequencies.dtype) * frequencies[None, None, None]
    return (jnp.cos(angles) * rope.magnitude).astype(dtype), (jnp.sin(angles) * rope.magnitude).astype(dtype)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate heads [B, T, N, H]; components i and i + H/2 are a pair, as in `transformers` and unlike in the paper.

    Example:
      >>> apply_rotary(jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1))).tolist()
      [[[[-1.0, 1.0]]]]
    """
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def from_hf(config: Mapping[str, Any]) -> Rope:
    """Return the `Rope` of a Hugging Face config: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Raises:
      UserError: Only a part of the head is rotated, or a scaling or parameter is not supported.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {key: value for key, value in given.items() if value is not None}
    given.setdefault("rope_type", given.pop("type", "default"))
    given.setdefault("rope_theta", config.get("rope_theta") or DEFAULT.rope_theta)
    if given["rope_type"] in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise UserError(f"partial_rotary_factor {partial} is not supported: only 1.0 is")
    if unknown := given.keys() - {field.name for field in fields(Rope)} - {"type"}:
        name = min(unknown)
        raise UserError(f"{name} {given[name]!r} in rope_parameters is not supported: leave it out")
    return Rope(**{key: value for key, value in given.items() if key != "type"})


def to_hf(rope: Rope) -> dict[str, Any]:
    """Return `rope_parameters` as `transformers` reads them.

    Example:
      >>> to_hf(Rope())
      {'rope_theta': 10000.0, 'rope_type': 'default'}
    """
    values = {field.name: getattr(rope, field.name) for field in fields(Rope)}
    return {key: value for key, value in values.items() if value is not None and (key != "truncate" or not value)}


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _default(rope: Rope, wavelengths: np.ndarray, head_dim: int) -> np.ndarray:
    del rope, head_dim
    return np.float32(1) / wavelengths


def _linear(rope: Rope, wavelengths: np.ndarray, head_dim: int) -> np.ndarray:
    return _default(rope, wavelengths, head_dim) / np.float32(rope.factor)


def _llama3(rope: Rope, wavelengths: np.ndarray, head_dim: int) -> np.ndarray:
    factor, low, high, context = rope.factor, rope.low_freq_factor, rope.high_freq_factor, _context(rope)
    assert factor is not None
    assert low is not None
    assert high is not None
    plain = _default(rope, wavelengths, head_dim)
    # PyTorch divides a number by a tensor by multiplying with the reciprocal.
    periods = (np.float32(1) / plain) * np.float32(2 * math.pi)
    scaled = np.where(periods > context / low, plain / np.float32(factor), plain)
    smooth = ((np.float32(1) / periods) * np.float32(context) - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    is_between = ~(periods < context / high) & ~(periods > context / low)
    return np.where(is_between, between, scaled)


def _context(rope: Rope) -> int:
    assert rope.original_max_position_embeddings is not None
    return rope.original_max_position_embeddings


def _yarn(rope: Rope, wavelengths: np.ndarray, head_dim: int) -> np.ndarray:
    assert rope.factor is not None
    context = _context(rope)

    def dimension(rotations: float) -> float:
        """Return the dimension that makes this number of rotations over the original context."""
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in `transformers`
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    extrapolated = 1 - np.clip(ramp, 0, 1)
    interpolated = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    return interpolated * (1 - extrapolated) + _default(rope, wavelengths, head_dim) * extrapolated


_SCALED = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
