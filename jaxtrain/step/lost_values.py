"""What a low precision loses of a program's values, by layer, and what to do about it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jaxtrain.passes import BASE, bounds, rounding_limits

ADVISED = 0.01
"""The share of the elements that are not zero from which a loss is worth advice."""
KINDS = ("activations", "activation_gradients", "weights", "weight_gradients")


@dataclass(frozen=True)
class Magnitudes:
    """Histogram of the magnitudes of values before they are rounded to a dtype.

    Attributes:
      dtype: Name of the dtype.
      counts: The number of elements in each interval of `edges`; the last are the NaNs.
    """

    dtype: str
    counts: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, pairs: Any) -> Self:
        """Return the histogram of what `count_from` returned, or of sums of it."""
        high, low = np.asarray(pairs, np.float64).astype(np.int64)
        return cls(dtype, tuple((-np.diff(high * BASE + low, append=0)).tolist()))

    @property
    def edges(self) -> tuple[float, ...]:
        """The lower ends of the intervals: 0, the smallest float32, and so on up to NaN."""
        return tuple(np.array(bounds(_dtype(self.dtype)), np.int32).view(np.float32).tolist())

    @property
    def total(self) -> int:
        """The number of elements."""
        return sum(self.counts)

    @property
    def zero(self) -> int:
        """Elements that are zero before they are rounded."""
        return self.counts[0]

    @property
    def underflow(self) -> int:
        """Elements that are rounded to zero."""
        return self._between(1, self._limits.nonzero)

    @property
    def subnormal(self) -> int:
        """Elements that are rounded to a subnormal number, which has fewer digits."""
        return self._between(self._limits.nonzero, self._limits.normal)

    @property
    def normal(self) -> int:
        """Elements that are rounded to a normal number."""
        return self._between(self._limits.normal, self._limits.overflow)

    @property
    def overflow(self) -> int:
        """Elements that are rounded to inf, or that are inf before."""
        return self.total - self.nan - self._between(0, self._limits.overflow)

    @property
    def nan(self) -> int:
        """Elements that are NaN before they are rounded."""
        return self.counts[-1]

    def share(self, name: str) -> float:
        """Return the share of "underflow", "subnormal", "overflow" among the elements that are not zero."""
        return getattr(self, name) / max(self.total - self.zero, 1)

    @property
    def lost(self) -> float:
        """The share of underflow and overflow among the elements that are not zero."""
        return self.share("underflow") + self.share("overflow")

    @property
    def exponents(self) -> tuple[int, int] | None:
        """Binary exponents of the least and the largest magnitudes, but for the least 1% and the infinite ones.

        None without finite elements besides zero.
        """
        counts = np.array(self.counts[1:-1])
        if not counts.any():
            return None
        reached = np.cumsum(counts)
        first, last = int(np.argmax(reached > ADVISED * reached[-1])), int(np.flatnonzero(counts)[-1])
        ends = [*self.edges[1:-1], float("inf")]
        low, high = max(ends[first], 2.0**-149), min(ends[last + 1], float(np.finfo(np.float32).max))
        return math.floor(math.log2(low)), math.ceil(math.log2(high))

    @property
    def limits(self) -> tuple[float, float, float]:
        """The first magnitudes that are rounded to nonzero numbers, to normal ones, and to inf."""
        nonzero, normal, overflow = np.array(self._limits, np.int32).view(np.float32).tolist()
        return nonzero, normal, overflow

    @property
    def _limits(self) -> Any:
        return rounding_limits(_dtype(self.dtype))

    def _between(self, low: int, high: int) -> int:
        return sum(n for bound, n in zip(bounds(_dtype(self.dtype)), self.counts, strict=True) if low <= bound < high)


@dataclass(frozen=True)
class LayerLosses:
    """What a layer loses.

    Attributes:
      name: "layer 0" and so on for the blocks marked by `jaxtrain.block`, in order; "before the layers" and "after the
        layers" for the rest, or "model" for all of a model without blocks.
      activations: Results of products and conversions that depend on the batch.
      activation_gradients: Their gradients, multiplied by the loss scale.
      weights: Parameters, converted to the dtype.
      weight_gradients: Their gradients, multiplied by the loss scale.
    """

    name: str
    activations: Magnitudes
    activation_gradients: Magnitudes
    weights: Magnitudes
    weight_gradients: Magnitudes


@dataclass(frozen=True)
class PrecisionLosses:
    """What a precision loses of the values of a micro-batch and of their gradients.

    Attributes:
      dtype: Name of the dtype that the values are rounded to.
      gradient_dtype: Name of the dtype that their gradients are rounded to.
      loss_scale: The loss scale.
      layers: The layers, in order.
    """

    dtype: str
    gradient_dtype: str
    loss_scale: float
    layers: tuple[LayerLosses, ...]

    def advice(self) -> list[str]:
        """Return a line for each layer and kind of values of which more than 1% are lost.

        Returns:
          The lines; none if nothing has to be done.
        """
        return list(self.advice_by_kind().values())

    def advice_by_kind(self) -> dict[str, str]:
        """Return the lines of `advice` by "LAYER/KIND"."""
        return {
            f"{layer.name}/{kind}": self._advice(layer.name, kind, magnitudes)
            for layer in self.layers
            for kind in KINDS
            if (magnitudes := getattr(layer, kind)).lost > ADVISED
        }

    def shares(self) -> dict[str, float]:
        """Return the shares of underflow, subnormal numbers and overflow by "LAYER/KIND/NAME", for a log."""
        return {
            f"{layer.name}/{kind}/{name}": getattr(layer, kind).share(name)
            for layer in self.layers
            for kind in KINDS
            for name in ("underflow", "subnormal", "overflow")
            if getattr(layer, kind).total
        }

    def to_json(self) -> dict[str, Any]:
        """Return the histograms as a JSON object."""
        layers = {layer.name: {kind: getattr(layer, kind).counts for kind in KINDS} for layer in self.layers}
        dtypes = {"dtype": self.dtype, "gradient_dtype": self.gradient_dtype}
        return {**dtypes, "loss_scale": self.loss_scale, "layers": layers}

    @classmethod
    def from_json(cls, losses: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote."""
        dtypes = losses["dtype"], losses["gradient_dtype"]

        def layer(name: str, kinds: Mapping[str, Sequence[int]]) -> LayerLosses:
            pairs = zip(dtypes * 2, KINDS, strict=True)
            return LayerLosses(name, *(Magnitudes(dtype, tuple(kinds[kind])) for dtype, kind in pairs))

        layers = tuple(layer(name, kinds) for name, kinds in losses["layers"].items())
        return cls(*dtypes, losses["loss_scale"], layers)

    def _advice(self, layer: str, kind: str, found: Magnitudes) -> str:
        what = kind.replace("_", " ")
        flaw = "underflow" if found.underflow >= found.overflow else "overflow"
        text = f"{layer}: {found.share(flaw):.1%} of the {what} {flaw} in {found.dtype}: "
        return text + self._remedy(kind, flaw, found)

    def _remedy(self, kind: str, flaw: str, found: Magnitudes) -> str:
        if found.dtype.startswith("float8"):
            return "use finer scales (--precision fp8_row or fp8_block), or leave it in 16 bits (exclude of Fp8)"
        if found.dtype == "bfloat16":
            return "compute the layer in float32 (jaxtrain.autocast_disabled), and check its initialization"
        otherwise = "compute the layer in float32 (jaxtrain.autocast_disabled), or use --precision bf16"
        if not kind.endswith("gradients"):
            return otherwise
        if flaw == "overflow":
            return f"the loss scale falls after a skipped update; if this persists, {otherwise}"
        octaves = self._octaves_needed(found)
        if octaves <= self._headroom():
            scale = f"2.0**{math.ceil(math.log2(self.loss_scale)) + octaves}"
            return f"raise the loss scale, as with --loss-scale 'dynamic_loss_scale(init_scale={scale})'"
        return f"a larger loss scale would overflow in other layers: use per_layer_loss_scale, {otherwise}"

    def _octaves_needed(self, found: Magnitudes) -> int:
        """The factor, as an exponent, that raises all but 1% of the magnitudes above those rounded to zero."""
        return math.floor(math.log2(found.limits[0])) - found.exponents[0] if found.exponents else 0

    def _headroom(self) -> int:
        """The largest factor of the loss scale, as an exponent, with which no gradient overflows."""
        limit = math.floor(math.log2(float(jnp.finfo(_dtype(self.gradient_dtype)).max))) + 1
        gradients = [getattr(layer, kind).exponents for layer in self.layers for kind in KINDS[1::2]]
        return limit - max((ends[1] for ends in gradients if ends), default=limit)


def layer_names(blocks: int) -> Sequence[str]:
    """Return the names of what comes before the blocks, of the blocks, and of what comes after the first."""
    if not blocks:
        return ["model", "after"]
    return ["before the layers", *(f"layer {i}" for i in range(blocks)), "after the layers"]


def _dtype(name: str) -> Any:
    return jnp.dtype(name)
