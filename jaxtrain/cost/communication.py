"""Bytes that a device sends in one run of a compiled program, read from the program's text.

The text of a partitioned program is that of one device: its shapes are those of one device, and every collective lists
the participating devices. Bytes are those of ring algorithms (Patarasuk and Yuan 2009), which are optimal. With n
devices, each sends (n−1)/n of the result of an all-gather or of the operand of a reduce-scatter or an all-to-all, twice
that for an all-reduce, and the whole operand of a collective-permute. A ragged all-to-all counts as an all-to-all that
divides evenly the rows of its operand, or those of its result if these are fewer.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.program.hlo import Computation, Instruction, parse_hlo, parse_numbers


class Traffic(NamedTuple):
    """Collectives of one kind over the same axes of a mesh.

    Attributes:
      kind: The HLO opcode, such as all-gather.
      axes: The axes of the mesh.
      times: How many collectives run.
      sent: Bytes that a device sends in all of them.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    sent: float


class Communication(NamedTuple):
    """The communication of one run of a program.

    Attributes:
      traffic: The collectives, most bytes first.
      unbounded_loops: Number of loops with collectives and an unknown length, counted as one iteration.
    """

    traffic: tuple[Traffic, ...]
    unbounded_loops: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends in total."""
        return sum(t.sent for t in self.traffic)


def communication(hlo: str, mesh: Mapping[str, int]) -> Communication:
    """Count the bytes that a device sends in one run of a compiled program.

    Collectives in a loop count once per iteration, and a conditional counts as its most expensive branch. An all-reduce
    of which every device uses only its own shard counts as a reduce-scatter, because the compilers for GPUs and TPUs
    convert it (`ReduceScatterCreator` in XLA), other than the one for CPUs.

    Args:
      hlo: The program, as returned by `jax.stages.Compiled.as_text()`.
      mesh: Sizes of the mesh by axis.

    Returns:
      The communication by kind of collective and axes.

    Raises:
      ValueError: The text cannot be parsed.

    Example:
      >>> communication('''ENTRY %main (x: f32[256]) -> f32[1024] {
      ...   %x = f32[256]{0} parameter(0)
      ...   ROOT %whole = f32[1024]{0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
      ... }''', {"data": 2, "fsdp": 4}).traffic
      (Traffic(kind='all-gather', axes=('fsdp',), times=1, sent=3072.0),)
    """
    computations, entry = parse_hlo(hlo)
    program = _Program(computations, mesh)
    totals: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for part in program.traffic(entry, 1):
        before = totals.get(part[:2], Traffic(part.kind, part.axes, 0, 0.0))
        totals[part[:2]] = before._replace(times=before.times + part.times, sent=before.sent + part.sent)
    return Communication(tuple(sorted(totals.values(), key=lambda t: -t.sent)), len(program.unbounded_loops))


def traffic_of(
    computations: Mapping[str, Computation], mesh: Mapping[str, int]
) -> Callable[[str, Instruction], tuple[Traffic, ...]]:
    """Return a function of a computation's name and a collective in it that returns the collective's traffic."""
    program = _Program(computations, mesh)
    return lambda computation, x: tuple(program.collective(computation, x, 1))


_COLLECTIVE = re.compile(r"(?:ragged-)?(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start)?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{(.*?)\}(?:,|$)")
_LISTED = re.compile(r"\breplica_groups=\{(?:\{([\d,]+)\})?")
_IOTA = re.compile(r"\breplica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_AXES = re.compile(r"\breplica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}")
_TILED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_SIZE = re.compile(r"'?([\w.]+)'?=(\d+)")
_PART = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")
# Operations that change only the layout or the dtype of values.
_LAYOUT_ONLY = {"bitcast", "copy", "reshape", "transpose", "convert"}


class _Program:
    """The computations of a program for a mesh, and the loops of unknown length found so far."""

    def __init__(self, computations: Mapping[str, Computation], mesh: Mapping[str, int]) -> None:
        self.unbounded_loops: set[str] = set()
        self._mesh, self._computations = mesh, computations

    def traffic(self, computation: str, times: int) -> Iterator[Traffic]:
        """Yield the traffic of a computation that runs `times` times."""
        for x in self._computations[computation].instructions.values():
            if _COLLECTIVE.fullmatch(x.opcode):
                yield from self.collective(computation, x, times)
            elif x.opcode == "while":
                yield from self._loop(x, times)
            elif x.opcode == "conditional":
                branches = [list(self.traffic(branch, times)) for branch in x.called]
                yield from max(branches, key=lambda parts: sum(part.sent for part in parts))
            elif x.opcode in ("call", "async-start"):
                for called in x.called:
                    yield from self.traffic(called, times)

    def _loop(self, loop: Instruction, times: int) -> Iterator[Traffic]:
        iterations = times * (loop.trips or 1)
        inside = [part for called in loop.called for part in self.traffic(called, iterations)]
        if inside and loop.trips is None:
            self.unbounded_loops.add(loop.name)
        yield from inside

    def collective(self, computation: str, x: Instruction, times: int) -> Iterator[Traffic]:
        """Yield the traffic of a collective that runs `times` times."""
        kind = x.opcode.removeprefix("ragged-").removesuffix("-start")
        if kind == "collective-permute":
            yield from self._collective_permute(x, times)
            return
        group = _group(x.attributes, math.prod(self._mesh.values()))
        n, axes = len(group), self._axes(group)
        if n == 1:
            return
        arrays = [(array.size, array.size_bytes) for array in x.transferred]
        of_kind: dict[str, float] = defaultdict(float)
        for i, (size, size_bytes) in enumerate(arrays):
            if kind == "all-reduce":
                scattered = self._is_scattered(computation, x, i, size, n)
                of_kind["reduce-scatter" if scattered else kind] += size_bytes * (1 if scattered else 2) * (n - 1) / n
            elif kind == "reduce-scatter":
                of_kind[kind] += size_bytes * (n - 1)
            else:
                of_kind[kind] += size_bytes * (n - 1) / n
        for counted, sent in of_kind.items():
            yield Traffic(counted, axes, times, times * sent)

    def _collective_permute(self, x: Instruction, times: int) -> Iterator[Traffic]:
        found = _PAIRS.search(x.attributes)
        if found is None:
            raise ValueError(f"a collective-permute without source_target_pairs: {x.attributes[:200]}")
        pairs = np.array(parse_numbers(found[1].replace("{", "").replace("}", ""))).reshape(-1, 2)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        if len(pairs):
            crossed = {axis for pair in pairs for axis in self._axes(pair)}
            axes = tuple(axis for axis in self._mesh if axis in crossed)
            yield Traffic("collective-permute", axes, times, times * x.results[0].size_bytes)

    def _axes(self, devices: NDArray[np.int64]) -> tuple[str, ...]:
        """Return the axes of the mesh along which the devices differ."""
        coordinates = np.unravel_index(devices, tuple(self._mesh.values()))
        return tuple(axis for axis, at in zip(self._mesh, coordinates, strict=True) if len(set(at.tolist())) > 1)

    def _is_scattered(self, computation: str, x: Instruction, i: int, size: int, n: int) -> bool:
        """Return whether every device uses only one n-th of the i-th array of the result."""
        if not x.shape.startswith("("):
            return self._is_sliced(computation, x.name, size, n, lambda: False)
        elements = [
            user.name
            for user, _ in self._computations[computation].users[x.name]
            if user.opcode == "get-tuple-element" and re.match(rf", index={i}\b", user.attributes)
        ]
        return bool(elements) and all(self._is_sliced(computation, name, size, n, lambda: False) for name in elements)

    def _is_sliced(self, computation: str, value: str, size: int, n: int, outside: Callable[[], bool]) -> bool:
        """Return whether all uses of a value are of one n-th of it; `outside` answers for its uses in the caller."""
        inside = self._computations[computation]

        def use_is_sliced(user: Instruction, i: int) -> bool:
            if user.opcode == "dynamic-slice":
                return i == 0 and user.results[0].size * n == size
            if user.opcode in _LAYOUT_ONLY:
                return self._is_sliced(computation, user.name, size, n, outside)
            if user.opcode == "fusion":
                (fused,) = user.called
                parameter = self._computations[fused].parameter(i)
                return self._is_sliced(
                    fused, parameter, size, n, lambda: self._is_sliced(computation, user.name, size, n, outside)
                )
            return False

        users = inside.users.get(value, [])
        if value == inside.root:
            return outside() and all(use_is_sliced(*use) for use in users)
        return bool(users) and all(use_is_sliced(*use) for use in users)


def _group(attributes: str, devices: int) -> NDArray[np.int64]:
    """Return the devices in the group of the first one.

    The formats are those of XLA's `replica_group.cc`: a list, an iota, or axes of a mesh.
    """
    if found := _LISTED.search(attributes):
        return np.array(parse_numbers(found[1])) if found[1] else np.arange(devices)
    if found := _IOTA.search(attributes):
        return _tiled(found[2], found[3])[: int(found[1])]
    if found := _MESH_AXES.search(attributes):
        return _group_of_mesh(*found.groups())
    raise ValueError(f"a collective without replica_groups: {attributes[:200]}")


def _group_of_mesh(sizes: str, devices: str | None, parts: str) -> NDArray[np.int64]:
    """Return the devices along axes of a mesh, or along factors of axes: "axis:(2)4" is the second of 2 · 4 · rest."""
    shape = {name: int(size) for name, size in _SIZE.findall(sizes)}
    along = {name: np.zeros(1, np.int64) for name in shape}
    for name, before, size in _PART.findall(parts):
        step = shape[name] // (int(before) * int(size)) if size else 1
        count = int(size) if size else shape[name]
        along[name] = np.add.outer(along[name], step * np.arange(count)).ravel()
    if devices is None:
        grid = np.arange(math.prod(shape.values()))
    else:
        tiled = _TILED.fullmatch(devices)
        grid = _tiled(tiled[1], tiled[2]) if tiled else np.array(parse_numbers(devices))
    return grid.reshape(tuple(shape.values()))[np.ix_(*along.values())].ravel()


def _tiled(dimensions: str, transposed: str | None) -> NDArray[np.int64]:
    """Return 0, 1, 2, … reshaped to the dimensions, transposed and flattened."""
    shape = parse_numbers(dimensions)
    order = parse_numbers(transposed) if transposed else list(range(len(shape)))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel()
