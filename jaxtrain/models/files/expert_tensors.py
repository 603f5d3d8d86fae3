"""Mixtral's experts between checkpoint files, one tensor per expert, and the model, one tensor per layer.

On disk `block_sparse_moe.experts.{i}` has w1 (gate) and w3 (up) [hidden, width] and w2 (down) [width, hidden]. In the
model, as in `transformers`, `mlp.experts` has gate_up_proj [experts, 2 · hidden, width] and down_proj [experts, width,
hidden].
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import StoredTensor

_SINGLE = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_STACKED = re.compile(r"(.*)\.mlp\.experts\.(gate_up|down)_proj")
_PARTS = {"gate_up": ("w1", "w3"), "down": ("w2",)}


def stack_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint under the names of the model; stacks are read expert by expert.

    Raises `UserError` if experts are missing or differ in shape.
    """
    found: dict[str, Any] = {}
    experts: dict[str, dict[tuple[int, str], Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := _SINGLE.fullmatch(name):
            experts[match[1]][int(match[2]), match[3]] = tensor
        else:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for layer, parts in experts.items():
        count = max(i for i, _ in parts) + 1
        for kind, names in _PARTS.items():
            if len(parts) != 3 * count or len({parts[i, name].shape for i in range(count) for name in names}) != 1:
                raise UserError(f"experts of {layer} are missing or differ in shape: download the weights again")
            stacks = [[parts[i, name] for name in names] for i in range(count)]
            found[f"{layer}.mlp.experts.{kind}_proj"] = _stacked(f"{layer}.mlp.experts.{kind}_proj", stacks)
    return found


def unstack_experts(named: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the model under the names of a checkpoint.

    Example:
      >>> [(name, x.shape) for name, x in unstack_experts(iter([("h.mlp.experts.gate_up_proj", np.zeros((1, 6, 2)))]))]
      [('h.block_sparse_moe.experts.0.w1.weight', (3, 2)), ('h.block_sparse_moe.experts.0.w3.weight', (3, 2))]
    """
    for name, tensor in named:
        if match := _STACKED.fullmatch(name):
            names = _PARTS[match[2]]
            for i, expert in enumerate(tensor):
                for part, x in zip(names, np.split(expert, len(names)), strict=True):
                    yield f"{match[1]}.block_sparse_moe.experts.{i}.{part}.weight", x
        else:
            yield name.replace(".mlp.", ".block_sparse_moe."), tensor


def _stacked(name: str, stacks: list[list[Any]]) -> StoredTensor:
    first = stacks[0][0]
    rows, columns = first.shape
    shape = (len(stacks), rows * len(stacks[0]), columns)

    def read_part(index: tuple[slice, ...]) -> np.ndarray:
        experts, among, within = (slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))
        chosen = stacks[experts]
        stack = np.empty((len(chosen), among.stop - among.start, within.stop - within.start), first.dtype)
        for target, expert in zip(stack, chosen, strict=True):
            for i, tensor in enumerate(expert):
                # The rows of this tensor, numbered in the stack.
                start, stop = max(among.start, i * rows), min(among.stop, (i + 1) * rows)
                if start < stop:
                    part = tensor[start - i * rows : stop - i * rows, within]
                    target[start - among.start : stop - among.start] = part
        return stack

    return StoredTensor(name, shape, first.dtype, lambda: read_part((slice(None),) * 3), read_part)
