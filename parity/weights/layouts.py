"""The layouts in which a tensor of one shape can fill a leaf of another."""

from collections.abc import Iterator

import torch

from jaxtrain.interop import (
    AS_IS,
    CONV,
    LINEAR,
    Layout,
    bias_to_heads,
    linear_after_flatten,
    linear_from_heads,
    linear_to_heads,
)
from jaxtrain.torch_internals import Convolution

Shape = tuple[int, ...]
Convolution = Convolution
OWNERS = (torch.nn.Linear, Convolution)
"""Modules whose weight has its axes in another order in JAX."""


def whole_layouts(theirs: Shape, ours: Shape, owner: type | None, channels: set[int]) -> list[Layout]:
    """Return the layouts with the axes of PyTorch's tensor, the likeliest first.

    Args:
      theirs: Shape of the tensor.
      ours: Shape of the leaf.
      owner: The class of `OWNERS` whose weight it is.
      channels: Numbers of channels of images that a linear layer may flatten; empty for none.
    """
    found = [AS_IS] if ours == theirs else []
    if len(ours) == 2 and ours == theirs[::-1]:
        found = [LINEAR, *found] if owner is torch.nn.Linear else [*found, LINEAR]
        if owner is torch.nn.Linear:
            found += [linear_after_flatten(*image) for image in _images(ours[0], channels)]
    if len(ours) == len(theirs) > 2 and ours == (*theirs[2:], theirs[1], theirs[0]):
        found = [CONV] if owner is Convolution or not found else found
    return found


def head_layouts(theirs: Shape, ours: Shape) -> list[Layout]:
    """Return the layouts of an attention projection whose heads have a separate axis in JAX."""
    match theirs, ours:
        case (n,), (heads, size) if n == heads * size:
            return [bias_to_heads(heads, size)]
        case (n, n_in), (same, heads, size) if (n, n_in) == (heads * size, same):
            return [linear_to_heads(heads, size)]
        case (n_out, n), (heads, size, same) if (n_out, n) == (same, heads * size):
            return [linear_from_heads(heads, size)]
    return []


def _images(features: int, channels: set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (channels, height, width) of images that flatten to `features`, the squarest first."""
    for n in sorted(channels):
        pixels = features // n if features % n == 0 else 0
        heights = [height for height in range(1, pixels + 1) if pixels % height == 0 and pixels > 1]
        yield from ((n, h, pixels // h) for h in sorted(heights, key=lambda h: (max(h, pixels // h), h)))
