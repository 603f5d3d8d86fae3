"""The time and the bytes of collectives on GPUs that NVLink connects in nodes, and network adapters between nodes.

The model is the one by which NVIDIA's library NCCL itself chooses algorithms (`ncclTopoTuneModel` in
`src/graph/tuning.cc` of NVIDIA/nccl): latency of every hop, and bytes over the bandwidth of the slowest link. Around a
ring of n GPUs in N nodes, a gather takes n − 1 steps, N − 1 of them over the network, and an all-reduce twice as many
(Thakur, Rabenseifner and Gropp 2005 derive the same); a tree takes 2 log₂ N steps over the network. With m GPUs of a
group in each node there are m rings, one for each network adapter, so a ring over whole nodes leaves a node through
all of its adapters. Reductions inside of switches (SHARP) are not considered.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxtrain.cost.communication import Traffic


class _Protocol(NamedTuple):
    """A protocol of NCCL: share of the bandwidth, its limit across nodes, start, and latency of a hop, in seconds."""

    share: float
    most: float
    start: float
    in_node: float
    between: float


# LL, LL128 and Simple, of NCCL 2.27 for Hopper.
_RING = (
    _Protocol(0.5, 20.4e9, 6.6e-6, 0.6e-6, 2.7e-6),
    _Protocol(0.92, math.inf, 14e-6, 1.9e-6, 4e-6),
    _Protocol(1, math.inf, 8.4e-6, 3.4e-6, 14e-6),
)
_TREE = (
    _Protocol(0.92 / 3.8, math.inf, 6.8e-6, 0.6e-6, 5e-6),
    _Protocol(0.92 * 0.92, math.inf, 14e-6, 1.25e-6, 8.5e-6),
    _Protocol(0.92, math.inf, 8.4e-6, 4e-6, 14e-6),
)


class Group(NamedTuple):
    """The GPUs of a collective.

    Attributes:
      size: Their number.
      per_node: How many of them are in each node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes that they are in."""
        return math.ceil(self.size / self.per_node)


def group_along(mesh: Mapping[str, int], axes: Iterable[str], gpus_per_node: int) -> Group:
    """Return the group of GPUs along some axes of a mesh, whose last axes are neighbors in a node.

    Example:
      >>> mesh = {"data": 4, "fsdp": 16}
      >>> group_along(mesh, ["fsdp"], 8), group_along(mesh, ["data"], 8)
      (Group(size=16, per_node=8), Group(size=4, per_node=1))
    """
    grid = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    members = grid[tuple(slice(None) if axis in axes else 0 for axis in mesh)].ravel()
    return Group(members.size, int((members // gpus_per_node == members[0] // gpus_per_node).sum()))


@dataclass(frozen=True)
class Links:
    """The links of a GPU.

    Attributes:
      nvlink: Bytes/s that it sends to the others of its node.
      network: Bytes/s that it sends to other nodes.
      gpus_per_node: Number of GPUs of a node.
    """

    nvlink: float
    network: float
    gpus_per_node: int = 8

    def seconds(self, kind: str, sent: float, group: Group) -> float:
        """Return the time of a collective.

        Args:
          kind: The HLO opcode, such as all-gather.
          sent: Bytes that each GPU sends (`jaxtrain.cost.communication`).
          group: Its GPUs.
        """
        if group.size == 1:
            return 0.0
        if kind == "collective-permute":
            return min(self._time(p, sent, self._slowest(group), 1, int(group.nodes > 1)) for p in _RING)
        steps = (group.size - 1, group.nodes - 1)
        if kind == "all-to-all":
            over_network = self._over_network(kind, sent, group)
            transfer = max(over_network / self.network, (sent - over_network) / self.nvlink)
            others = group.size - group.per_node
            return min(self._time(p, 0.0, math.inf, group.size - 1, others) for p in _RING) + transfer
        bandwidth = self._ring_bandwidth(group)
        rounds = 2 if kind == "all-reduce" else 1
        times = [self._time(p, sent, bandwidth, rounds * steps[0], rounds * steps[1]) for p in _RING]
        if kind == "all-reduce":
            between = 2 * math.ceil(math.log2(group.nodes))
            hops = 2 * (group.per_node - 1) + between
            whole = sent * group.size / (group.size - 1)
            times += [self._time(p, whole, bandwidth, hops, between) for p in _TREE]
        return min(times)

    def over_network(self, traffic: Traffic, mesh: Mapping[str, int]) -> float:
        """Return the part of the bytes sent that leaves a node, on average over its GPUs."""
        return self._over_network(traffic.kind, traffic.sent, group_along(mesh, traffic.axes, self.gpus_per_node))

    def _over_network(self, kind: str, sent: float, group: Group) -> float:
        if group.nodes == 1:
            return 0.0
        if kind == "all-to-all":
            return sent * (group.size - group.per_node) / (group.size - 1)
        # One of the hops that begin in a node leaves it.
        return sent / group.per_node

    def _slowest(self, group: Group) -> float:
        return self.nvlink if group.nodes == 1 else self.network

    def _ring_bandwidth(self, group: Group) -> float:
        """Bytes/s around a ring, of which each node has `per_node`, one for each adapter."""
        return self.nvlink if group.nodes == 1 else min(self.nvlink, group.per_node * self.network)

    def _time(self, protocol: _Protocol, sent: float, bandwidth: float, hops: int, between: int) -> float:
        rate = protocol.share * bandwidth
        rate = min(rate, protocol.most) if between else rate
        return (
            protocol.start
            + (hops - between) * protocol.in_node
            + between * protocol.between
            + (sent / rate if sent else 0.0)
        )
