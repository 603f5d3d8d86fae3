"""Mixtral's experts as checkpoints keep them, one by one; in `transformers`, and here, a layer's are in one tensor.

On disk `block_sparse_moe.experts.{i}` has w1 and w3 [hidden, width], which are the gate and the way up, and w2
[width, hidden]; in the model `mlp.experts` has gate_up_proj [experts, 2 · hidden, width] and down_proj [experts, width,
hidden].
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import StoredTensor

_ALONE = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_TOGETHER = re.compile(r"(.*)\.mlp\.experts\.(gate_up|down)_proj")
_PARTS = {"gate_up": ("w1", "w3"), "down": ("w2",)}


def together(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors under the model's names, to be read as they are: expert by expert.

    Raises `UserError` where experts are missing, or are not alike.
    """
    found: dict[str, Any] = {}
    experts: dict[str, dict[tuple[int, str], Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := _ALONE.fullmatch(name):
            experts[match[1]][int(match[2]), match[3]] = tensor
        else:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for layer, parts in experts.items():
        count = max(i for i, _ in parts) + 1
        for kind, names in _PARTS.items():
            if len(parts) != 3 * count or len({parts[i, name].shape for i in range(count) for name in names}) != 1:
                raise UserError(f"the experts of {layer} are not all there, or not alike: take the weights anew")
            stacks = [[parts[i, name] for name in names] for i in range(count)]
            found[f"{layer}.mlp.experts.{kind}_proj"] = _joined(f"{layer}.mlp.experts.{kind}_proj", stacks)
    return found


def alone(named: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under a checkpoint's names.

    >>> [(name, x.shape) for name, x in alone(iter([("h.mlp.experts.gate_up_proj", np.zeros((1, 6, 2)))]))]
    [('h.block_sparse_moe.experts.0.w1.weight', (3, 2)), ('h.block_sparse_moe.experts.0.w3.weight', (3, 2))]
    """
    for name, tensor in named:
        if match := _TOGETHER.fullmatch(name):
            names = _PARTS[match[2]]
            for i, expert in enumerate(tensor):
                for part, x in zip(names, np.split(expert, len(names)), strict=True):
                    yield f"{match[1]}.block_sparse_moe.experts.{i}.{part}.weight", x
        else:
            yield name.replace(".mlp.", ".block_sparse_moe."), tensor


def _joined(name: str, stacks: list[list[Any]]) -> StoredTensor:
    first = stacks[0][0]
    rows, columns = first.shape
    shape = (len(stacks), rows * len(stacks[0]), columns)

    def read() -> np.ndarray:
        whole = np.empty(shape, first.dtype)
        for place, expert in zip(whole, stacks, strict=True):
            for i, part in enumerate(expert):
                place[i * rows : (i + 1) * rows] = np.asarray(part)
        return whole

    return StoredTensor(name, shape, first.dtype, read)
