"""Recipes of image classifiers."""

from dataclasses import dataclass
from typing import Literal

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """An image classifier on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    steps: int = 400
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    classes: int = 10
    """Number of classes; labels are 0 to classes - 1."""


@dataclass(frozen=True, kw_only=True)
class MLPRecipe(ImageRecipe):
    """A multilayer perceptron on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    hidden: int = 512
    """Width of the hidden layer."""


@dataclass(frozen=True, kw_only=True)
class CNNRecipe(ImageRecipe):
    """A small CNN on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    width: int = 16
    """Output channels of the convolution."""


@dataclass(frozen=True, kw_only=True)
class ResNetRecipe(ImageRecipe):
    """A ResNet with BatchNorm on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    depth: int = 1
    """Residual blocks, of two convolutions each, in each of the two stages."""
    width: int = 32
    """Channels of the first stage; the second stage has twice as many."""
    batch_norm: Literal["sync", "device"] = "sync"
    """BatchNorm statistics over all rows of a micro-batch, or per device of a mesh as in PyTorch's DDP."""
