"""The bytes that a device sends as a function of the size of a mesh axis, fitted to compiled programs and checked.

A collective over n devices sends a known part of a whole array: (n − 1)/n of it, or twice that. The whole arrays of a
training step are parameters and gradients, which do not depend on the mesh, and a few that every device gathers from
all others, such as the tokens of a batch, which grow with it: whole = constant + growth · size of the axis.
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
      growth: Bytes for each device along it, by collective.
    """

    axis: str
    growth: Mapping[Collective, float]

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
          >>> ClosedForms.fit("fsdp", [program(n) for n in (8, 64, 512)]).growth
          {('all-gather', ('fsdp',)): 100.0}
        """
        ordered = sorted(programs, key=lambda program: program[0][axis])
        sizes = [mesh[axis] for mesh, _ in ordered]
        wholes = [
            {(t.kind, t.axes): whole_bytes(t, mesh) for t in communication.traffic} for mesh, communication in ordered
        ]
        first, last = wholes[0], wholes[-1]
        growth = {
            key: round((last.get(key, 0.0) - first.get(key, 0.0)) / (sizes[-1] - sizes[0]), 6)
            for key in dict.fromkeys([*first, *last])
        }
        forms = cls(axis, growth)
        for (mesh, communication), found in zip(ordered[1:-1], wholes[1:-1], strict=True):
            for key in dict.fromkeys([*growth, *found]):
                expected = first.get(key, 0.0) + growth.get(key, 0.0) * (mesh[axis] - sizes[0])
                sent, by_form = (sent_bytes(key, whole, mesh) for whole in (found.get(key, 0.0), expected))
                if abs(sent - by_form) > TOLERANCE * communication.sent:
                    raise UserError(
                        f"not extrapolated along {axis}: the {key[0]} over {' × '.join(key[1])} of "
                        f"{axis}={mesh[axis]} sends {sent / 2**30:.3g} GiB, by the closed form between "
                        f"{axis}={sizes[0]} and {axis}={sizes[-1]} {by_form / 2**30:.3g} GiB"
                    )
        return forms

    def scaled(self, rows: float) -> "ClosedForms":
        """Return the closed forms of steps with `rows` times as many rows on a device."""
        return ClosedForms(self.axis, {key: rows * growth for key, growth in self.growth.items()})

    def at(self, traffic: Traffic, mesh: Mapping[str, int], size: int) -> Traffic:
        """Return the traffic of a program on `mesh` as it is with another size of the axis."""
        key = traffic.kind, traffic.axes
        whole = whole_bytes(traffic, mesh) + self.growth.get(key, 0.0) * (size - mesh[self.axis])
        return traffic._replace(sent=sent_bytes(key, max(0.0, whole), {**mesh, self.axis: size}))
