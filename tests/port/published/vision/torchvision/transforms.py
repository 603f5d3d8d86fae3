"""Transforms of images that are tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Compose:
    """One after another."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


class ToTensor:
    """The image itself, which is a tensor."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Normalize:
    """(x - mean) / std of each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        self.mean, self.std = (torch.tensor(x)[:, None, None] for x in (mean, std))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


class Resize:
    """Images of a size."""

    def __init__(self, size: Any, *args: Any) -> None:
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x[None], self.size, mode="bilinear", align_corners=False)[0]


class CenterCrop(Resize):
    """The middle of an image."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        top, left = ((have - want) // 2 for have, want in zip(x.shape[-2:], self.size, strict=True))
        return x[..., top : top + self.size[0], left : left + self.size[1]]


class RandomCrop(Resize):
    """A part of an image."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        room = [have - want + 1 for have, want in zip(x.shape[-2:], self.size, strict=True)]
        top, left = (int(torch.randint(n, ())) for n in room)
        return x[..., top : top + self.size[0], left : left + self.size[1]]


class RandomResizedCrop(Resize):
    """An image of a size."""


class Pad:
    """An image with a border."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (self.padding,) * 4)


class RandomHorizontalFlip:
    """An image, or its mirror image."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if float(torch.rand(())) < self.p else x


class Lambda:
    """A function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)
