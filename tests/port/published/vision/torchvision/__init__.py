"""A stand-in for torchvision with data made on the spot: what the published training scripts use of it."""

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
__version__ = "0"
