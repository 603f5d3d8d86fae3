"""The bytes that a device sends as a function of the size of a mesh axis, fitted to compiled programs and checked.

A collective over n devices sends a known part of a whole array: (n − 1)/n of it, or twice that. Along the axis, the
whole arrays of a training step are parameters and gradients, which do not depend on its size x, and a few that every
device gathers from all others, such as the tokens of a batch: whole = constant + coefficient · x. Along other axes,
they are whole or divided by it: whole = constant + coefficient / x.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.cost import Communication, Traffic
from jaxtrain.errors import UserError

TOLERANCE = 0.01
"""Share of all bytes by which a program may differ from the closed forms."""

Collective = tuple[str, tuple[str, ...]]
"""The kind of a collective and its axes."""


def whole_bytes(traffic: Traffic, mesh: Mapping[str, int]) -> float:
    """Return the bytes of the whole arrays of collectives.

    Example:
      >>> whole_bytes(Traffic("all-gather", ("fsdp",), times=1, sent=3072.0), {"data": 2, "fsdp": 4})
      4096.0
    """
    return traffic.sent / _share(traffic.kind, traffic.axes, mesh)


def sent_bytes(collective: Collective, whole: float, mesh: Mapping[str, int]) -> float:
    """Return the bytes that a device sends in collectives of whole arrays.

    Example:
      >>> sent_bytes(("all-reduce", ("data",)), 4096.0, {"data": 8, "fsdp": 4})
      7168.0
    """
    return whole * _share(*collective, mesh)


def _share(kind: str, axes: Sequence[str], mesh: Mapping[str, int]) -> float:
    n = math.prod(mesh[axis] for axis in axes)
    return 1.0 if kind == "collective-permute" else (n - 1) / n * (2 if kind == "all-reduce" else 1)


@dataclass(frozen=True)
class ClosedForms:
    """How the whole arrays of collectives grow with a mesh axis.

    Attributes:
      axis: The axis.
      coefficients: The coefficient of each collective, in bytes.
    """

    axis: str
    coefficients: Mapping[Collective, float]

    @classmethod
    def fit(cls, axis: str, programs: Sequence[tuple[Mapping[str, int], Communication]]) -> "ClosedForms":
        """Fit the closed forms to the smallest and the largest program, and check them on those between.

        Args:
          axis: The axis by whose size the meshes differ.
          programs: Meshes and the communication of their programs, at least three.

        Raises:
          UserError: The bytes of a program differ from the closed forms by more than `TOLERANCE`.

        Example:
          >>> def program(n):
          ...     gathered = Traffic("all-gather", ("fsdp",), 1, (1e6 + 100 * n) * (n - 1) / n)
          ...     return {"fsdp": n}, Communication((gathered,), 0)
          >>> ClosedForms.fit("fsdp", [program(n) for n in (8, 64, 512)]).coefficients
          {('all-gather', ('fsdp',)): 100.0}
        """
        ordered = sorted(programs, key=lambda program: program[0][axis])
        sizes = [mesh[axis] for mesh, _ in ordered]
        wholes = [
            {(t.kind, t.axes): whole_bytes(t, mesh) for t in communication.traffic} for mesh, communication in ordered
        ]
        first, last = wholes[0], wholes[-1]
        coefficients = {
            key: round((last.get(key, 0.0) - first.get(key, 0.0)) / _difference(axis, key, sizes[0], sizes[-1]), 6)
            for key in dict.fromkeys([*first, *last])
        }
        forms = cls(axis, coefficients)
        for (mesh, communication), found in zip(ordered[1:-1], wholes[1:-1], strict=True):
            for key in dict.fromkeys([*coefficients, *found]):
                expected = first.get(key, 0.0) + forms._growth(key, sizes[0], mesh[axis])
                sent, by_form = (sent_bytes(key, whole, mesh) for whole in (found.get(key, 0.0), expected))
                if abs(sent - by_form) > TOLERANCE * communication.sent:
                    raise UserError(
                        f"not extrapolated along {axis}: the {key[0]} over {' × '.join(key[1])} of "
                        f"{axis}={mesh[axis]} sends {sent / 2**30:.3g} GiB, by the closed form between "
                        f"{axis}={sizes[0]} and {axis}={sizes[-1]} {by_form / 2**30:.3g} GiB"
                    )
        return forms

    @property
    def gathered(self) -> float:
        """Bytes that a device gathers more for each device along the axis."""
        return sum(bytes for (_, axes), bytes in self.coefficients.items() if self.axis in axes)

    def scaled(self, rows: float) -> "ClosedForms":
        """Return the closed forms of steps with `rows` times as many rows on a device."""
        scaled = {key: x * (rows if self.axis in key[1] else 1) for key, x in self.coefficients.items()}
        return ClosedForms(self.axis, scaled)

    def at(self, traffic: Traffic, mesh: Mapping[str, int], size: int) -> Traffic:
        """Return the traffic of a program on `mesh` as it is with another size of the axis."""
        key = traffic.kind, traffic.axes
        whole = whole_bytes(traffic, mesh) + self._growth(key, mesh[self.axis], size)
        return traffic._replace(sent=sent_bytes(key, max(0.0, whole), {**mesh, self.axis: size}))

    def _growth(self, key: Collective, size: int, larger: int) -> float:
        return self.coefficients.get(key, 0.0) * _difference(self.axis, key, size, larger)


def _difference(axis: str, key: Collective, size: int, larger: int) -> float:
    return larger - size if axis in key[1] else 1 / larger - 1 / size
