"""`torch.bincount` of values that are below `minlength` by construction, as numbers of experts: the bins are known."""

from math import prod
from typing import Any, cast

import torch

from jaxtrain.torch_import.capture.values.known_values import known_value
from jaxtrain.torch_import.refusals import refusal, source_line

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("jaxtrain", "FRAGMENT")
_LIBRARY.define("bincount(Tensor x, Tensor? weights, int minlength) -> Tensor")
_LIBRARY.impl("bincount", torch.bincount, "CPU")


@torch.library.register_fake("jaxtrain::bincount")
def _shape(x: torch.Tensor, weights: torch.Tensor | None, minlength: int) -> torch.Tensor:
    if weights is None:
        return x.new_empty(minlength, dtype=torch.int64)
    return x.new_empty(minlength, dtype=torch.float32 if weights.dtype is torch.float32 else torch.float64)


_bincount = torch.bincount


def _of_minlength(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """`torch.bincount` as an operation of our own, where the values and thus the number of bins are not known."""
    if not minlength or known_value(input) is not None:
        return _bincount(input, weights, minlength)
    counts: torch.Tensor = torch.ops.jaxtrain.bincount(input, None if weights is None else weights.detach(), minlength)
    return counts


BINCOUNT: tuple[tuple[Any, str, Any], ...] = (
    (torch, "bincount", _of_minlength),
    (torch.Tensor, "bincount", _of_minlength),
)
"""Replacements while a module is traced: owner, name and value."""


def check_bins(exported: torch.export.ExportedProgram) -> None:
    """Refuse bins of a pure program that may be too few."""
    for node in exported.graph_module.graph.find_nodes(op="call_function", target=torch.ops.jaxtrain.bincount.default):
        x, _, minlength = node.args
        bound = _bound(x)
        if bound is None or bound > minlength:
            raise refusal(
                f"a shape depends on a tensor's value: torch.bincount has more than {minlength} bins for larger ones",
                f"use F.one_hot(x, {minlength}).sum(0), or clamp the values",
                source_line(node.meta.get("stack_trace")),
            )


def _bound(node: Any) -> int | None:
    """Return a number that all values of a node are below; None if there is none."""
    if not isinstance(node, torch.fx.Node):
        return None
    if node.meta["val"].dtype is torch.bool:
        return 2
    target, args = node.target, cast(Any, node.args)
    if getattr(target, "__name__", "") == "getitem":
        of, place = args
        packet = getattr(of.target, "overloadpacket", None)
        if packet in _PLACES and place == 1:
            return _size(of, _PLACES[packet], -1)
        return _bound(of.args[0]) if packet in _PARTS else None
    packet = getattr(target, "overloadpacket", None)
    if packet in (_ATEN.argmax, _ATEN.argmin, _ATEN.argsort):
        return _size(node, 1, None)
    if packet is _ATEN.remainder and isinstance(args[1], int) and args[1] > 0:
        return args[1]
    if packet is _ATEN.clamp_max or (packet is _ATEN.clamp and len(args) > 2):
        return args[-1] + 1 if isinstance(args[-1], int) else None
    return _bound(args[0]) if packet in _MOVING else None


_PLACES = {_ATEN.topk: 2, _ATEN.sort: 1, _ATEN.max: 1, _ATEN.min: 1}
"""Operations whose second result is places along an axis, with the argument of the axis."""
_PARTS = (_ATEN.unbind, _ATEN.split, _ATEN.split_with_sizes, _ATEN.chunk)
_MOVING = (
    *(_ATEN.view, _ATEN._unsafe_view, _ATEN.reshape, _ATEN.flatten, _ATEN.squeeze, _ATEN.unsqueeze, _ATEN.select),
    *(_ATEN.slice, _ATEN.permute, _ATEN.transpose, _ATEN.t, _ATEN.expand, _ATEN.clone, _ATEN.detach, _ATEN.alias),
    *(_ATEN._to_copy, _ATEN.index, _ATEN.gather, _ATEN.index_select, _ATEN.flip, _ATEN.repeat),
)
"""Operations whose values are among those of their first argument."""


def _size(node: torch.fx.Node, place: int, default: int | None) -> int:
    """Return the size of the axis that is an argument of an operation, by its place; of all axes for None."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    return int(shape[dim]) if isinstance(dim, int) and len(shape) else prod(shape)
