"""Image classification."""

from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxtrain.data import Arrays, ImageFolder, check_labels, digits, image_folder, npz
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.models import CNN, MLP, functional
from jaxtrain.objective import Loss
from jaxtrain.recipes import CNNRecipe, ImageRecipe, MLPRecipe
from jaxtrain.tasks.task import Task, row_weights

Images = Arrays | ImageFolder


def classification_task(recipe: ImageRecipe) -> Task:
    """The task of an `ImageRecipe`."""
    train, validation = _images(recipe.data)
    for source in (train, validation):
        check_labels(source.labels, recipe.classes)
    shape = train[0]["image"].shape
    apply, params = functional(_model(recipe, shape))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        del rng
        logits, labels = apply(params, batch["image"]), batch["label"]
        weight = row_weights(batch, len(labels))
        correct = (logits.argmax(-1) == labels).astype(np.float32)
        count = weight.sum()
        loss = Loss((cross_entropy(logits, labels) * weight).sum(), count)
        return loss, {"accuracy": Loss((correct * weight).sum(), count)}

    frequencies = np.bincount(validation.labels, minlength=recipe.classes) / len(validation)
    present = frequencies[frequencies > 0]
    return Task(
        params=params,
        loss_fn=loss_fn,
        train=train,
        validation=validation,
        eval_rows=len(validation),
        classes=recipe.classes,
        unit="examples",
        units_per_row=1,
        facts={
            "images": str(recipe.data) if recipe.data else "scikit-learn's handwritten digits",
            "examples": f"{len(train):,} to train on, {len(validation):,} to validate on",
            "labels": f"{train.labels.min()} to {train.labels.max()}, of {recipe.classes} classes",
        },
        references={"class entropy": float(present @ np.log(1 / present))},
    )


def _model(recipe: ImageRecipe, shape: tuple[int, ...]) -> nnx.Module:
    rngs = nnx.Rngs(recipe.seed)
    if isinstance(recipe, CNNRecipe):
        if len(shape) != 3 or min(shape[:2]) < 3:
            raise UserError(f"images of shape {list(shape)} are too small for a 3×3 convolution: use digits-mlp")
        return CNN(shape, recipe.width, recipe.classes, rngs=rngs)
    if isinstance(recipe, MLPRecipe):
        return MLP((int(np.prod(shape)), recipe.hidden, recipe.classes), rngs=rngs)
    raise TypeError(f"no model for {type(recipe).__name__}")


def _images(path: Path | None) -> tuple[Images, Images]:
    if path is None:
        return digits()
    if not path.exists():
        raise UserError(f"{path} does not exist: give an .npz file or a folder with one sub-folder of images a class")
    return image_folder(path) if path.is_dir() else npz(path)
