"""Datasets of random images [channels, height, width] from 0 to 1, of the sizes of those of torchvision."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset


class _Images(Dataset[Any]):
    """Random images with labels."""

    shape, classes, count = (1, 28, 28), list(map(str, range(10))), 200

    def __init__(
        self,
        root: Any = None,
        *args: Any,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.transform = transform or next((x for x in args if callable(x)), None)
        self.target_transform = target_transform
        generator = torch.Generator().manual_seed(0)
        self.data = torch.rand((self.count, *self.shape), generator=generator)
        self.targets = torch.randint(len(self.classes), (self.count,), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        image, target = self.data[i], int(self.targets[i])
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)


class MNIST(_Images):
    """Images [1, 28, 28], whose `data` have no channels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data = self.train_data = self.test_data = self.data[:, 0]
        self.train_labels = self.test_labels = self.targets

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        image, target = self.data[i][None], int(self.targets[i])
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)


class FashionMNIST(MNIST):
    """Images [1, 28, 28]."""


class CIFAR10(_Images):
    """Images [3, 32, 32]."""

    shape = (3, 32, 32)


class ImageFolder(_Images):
    """Images [3, 64, 64]."""

    shape = (3, 64, 64)


class FakeData(_Images):
    """Images of a given number and size."""

    def __init__(
        self,
        size: int = 200,
        image_size: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.count, self.shape, self.classes = min(size, 200), tuple(image_size), list(map(str, range(num_classes)))
        super().__init__(transform=transform)


class LSUN(ImageFolder):
    """Images [3, 64, 64]."""
