"""Image classification, and the classifiers without running statistics: a multilayer perceptron and a small CNN."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import Arrays, ImageFolder, check_labels, pixels, split_images, unigram_entropy
from jaxtrain.fields import Width
from jaxtrain.models import CNN, MLP, cnn, functional, mlp
from jaxtrain.run import Input, Signature, row_weights


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(jt.Recipe):
    """An image classifier on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    data: Path | None = None
    """Path of your own data, instead of the recipe's."""
    steps: int = 400
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    classes: Width = 10
    """Number of classes; labels are 0 to classes - 1."""

    def model(self, shape: tuple[int, ...]) -> nnx.Module:
        """Return the model of images of this shape, called as `model(images)`."""
        raise NotImplementedError

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        train, validation = self.images()
        shape = train[0]["image"].shape
        model = nnx.eval_shape(lambda: self.model(shape))
        apply, _ = functional(model)

        def predict(params: Any, batch: Any, _: Any) -> jt.Predictions:
            return predictions(apply(params, pixels(batch["image"])), batch)

        def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
            predicted = predict(params, batch, None)
            return predicted.loss(), {"accuracy": predicted.accuracy()}

        return jt.Task(
            init=lambda: functional(self.model(shape))[1],
            loss_fn=loss_fn,
            predict=predict,
            **self.common_fields(model, train, validation),
        )

    def images(self) -> tuple[Arrays | ImageFolder, Arrays | ImageFolder]:
        """Return (train, validation). Raises `UserError` for labels outside the classes."""
        train, validation = split_images(self.data)
        check_labels(np.concatenate([train.labels, validation.labels]), self.classes)
        return train, validation

    def common_fields(self, model: nnx.Module, train: Any, validation: Any) -> dict[str, Any]:
        """Return the fields of the task that do not depend on the loss."""
        images = {"image": Input(train[0]["image"].shape, np.float32)}
        return {
            "train": train,
            "validation": validation,
            "eval_rows": len(validation),
            "signature": Signature(model, images, lambda call, image: call(image)),
            "classes": self.classes,
            "class_names": getattr(validation, "classes", [*map(str, range(self.classes))]),
            "description": {
                "images": str(self.data) if self.data else "scikit-learn's handwritten digits",
                "examples": f"{len(train):,} for training, {len(validation):,} for validation",
                "labels": f"{train.labels.min()} to {train.labels.max()}, of {self.classes} classes",
            },
            "bounds": {"image": 256},
            "references": {"class entropy": unigram_entropy(validation.labels)},
        }


def predictions(logits: Any, batch: Any) -> jt.Predictions:
    """Return the predictions of the labels of a batch."""
    return jt.Predictions(logits, batch["label"], row_weights(batch, len(batch["label"])))


@dataclass(frozen=True, kw_only=True)
class MLPRecipe(ImageRecipe):
    """A multilayer perceptron on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    hidden: Width = 512
    """Width of the hidden layer."""

    def model(self, shape: tuple[int, ...]) -> MLP:
        """Return the model of images of any shape."""
        return MLP((math.prod(shape), self.hidden, self.classes), rngs=nnx.Rngs(self.seed))

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        return replace(super().task(), sharding=mlp.SHARDING, names=mlp.torch_names(2))


@dataclass(frozen=True, kw_only=True)
class CNNRecipe(ImageRecipe):
    """A small CNN on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    width: Width = 16
    """Output channels of the convolution."""

    def model(self, shape: tuple[int, ...]) -> CNN:
        """Return the model of images [H, W, C] of this shape."""
        if len(shape) != 3 or min(shape[:2]) < 3:
            raise jt.UserError(f"images must have at least 3×3 pixels, got shape {list(shape)}: use digits-mlp")
        return CNN((shape[0], shape[1], shape[2]), self.width, self.classes, rngs=nnx.Rngs(self.seed))

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        task = super().task()
        names = cnn.torch_names(task.train[0]["image"].shape, self.width)
        return replace(task, sharding=cnn.SHARDING, names=names)
