"""Image classification."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxtrain.data import Arrays, ImageFolder, check_labels, digits, image_folder, npz
from jaxtrain.distributed import data_parallel_size, run_mesh_sizes
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.models import CNN, MLP, cnn, functional, functional_with_state, mlp, resnet, set_batch_norm_groups
from jaxtrain.models.resnet import ResNet, ResNetConfig
from jaxtrain.recipes import CNNRecipe, ImageRecipe, MLPRecipe, ResNetRecipe
from jaxtrain.step import Loss, LossFn
from jaxtrain.tasks.task import Predictions, Task, row_weights

Images = Arrays | ImageFolder
Predict = Callable[[Any, Any, Any], Predictions]  # (params, batch, model_state)


def classification_task(recipe: ImageRecipe) -> Task:
    """Return the task of an `ImageRecipe`."""
    train, validation = _images(recipe.data)
    for source in (train, validation):
        check_labels(source.labels, recipe.classes)
    shape = train[0]["image"].shape

    if isinstance(recipe, ResNetRecipe):
        init, loss_fn, predict = _with_state(partial(resnet_model, recipe, shape))
    else:
        init, loss_fn, predict = _stateless(partial(image_model, recipe, shape))
    frequencies = np.bincount(validation.labels, minlength=recipe.classes) / len(validation)
    present = frequencies[frequencies > 0]
    return Task(
        init=init,
        loss_fn=loss_fn,
        predict=predict,
        class_names=validation.classes
        if isinstance(validation, ImageFolder)
        else [str(label) for label in range(recipe.classes)],
        train=train,
        validation=validation,
        eval_rows=len(validation),
        classes=recipe.classes,
        unit="examples",
        units_per_row=1,
        description={
            "images": str(recipe.data) if recipe.data else "scikit-learn's handwritten digits",
            "examples": f"{len(train):,} for training, {len(validation):,} for validation",
            "labels": f"{train.labels.min()} to {train.labels.max()}, of {recipe.classes} classes",
        },
        references={"class entropy": float(present @ np.log(1 / present))},
        sharding=_sharding(recipe),
        names=_names(recipe, shape),
        buffers=resnet.torch_buffers(_resnet_config(recipe, shape)) if isinstance(recipe, ResNetRecipe) else None,
    )


def image_model(recipe: ImageRecipe, shape: tuple[int, ...]) -> nnx.Module:
    """Return the MLP or CNN for images of this shape. Raises `UserError` for an unsupported shape."""
    rngs = nnx.Rngs(recipe.seed)
    if isinstance(recipe, CNNRecipe):
        if len(shape) != 3 or min(shape[:2]) < 3:
            raise UserError(f"images must have at least 3×3 pixels, got shape {list(shape)}: use digits-mlp")
        return CNN(shape, recipe.width, recipe.classes, rngs=rngs)
    if isinstance(recipe, MLPRecipe):
        return MLP((int(np.prod(shape)), recipe.hidden, recipe.classes), rngs=rngs)
    raise TypeError(f"no model for {type(recipe).__name__}")


def resnet_model(recipe: ResNetRecipe, shape: tuple[int, ...]) -> ResNet:
    """Return the ResNet for images of this shape. Raises `UserError` for an unsupported shape."""
    if len(shape) != 3:
        raise UserError(f"images must have height, width and channels, got shape {list(shape)}: use digits-mlp")
    model = ResNet(_resnet_config(recipe, shape), rngs=nnx.Rngs(recipe.seed))
    return set_batch_norm_groups(model, _groups(recipe))


def _groups(recipe: ResNetRecipe) -> int:
    """Return the number of BatchNorm groups: one per data-parallel device if each computes its own statistics."""
    return data_parallel_size(run_mesh_sizes(recipe.mesh)) if recipe.batch_norm == "device" else 1


def _resnet_config(recipe: ResNetRecipe, shape: tuple[int, ...]) -> ResNetConfig:
    return ResNetConfig(
        num_channels=shape[2],
        embedding_size=recipe.width,
        hidden_sizes=(recipe.width, 2 * recipe.width),
        depths=(recipe.depth, recipe.depth),
        layer_type="basic",
        num_labels=recipe.classes,
        stem_kernel=3,
        stem_stride=1,
        stem_pool=False,
    )


def _stateless(model: Callable[[], nnx.Module]) -> tuple[Callable[[], Any], LossFn, Predict]:
    apply, _ = functional(nnx.eval_shape(model))

    def predict(params: Any, batch: Any, model_state: Any) -> Predictions:
        del model_state
        return _predictions(apply(params, batch["image"]), batch)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        del rng
        predictions = predict(params, batch, None)
        return predictions.loss(), {"accuracy": predictions.accuracy()}

    return lambda: (functional(model())[1], None), loss_fn, predict


def _with_state(model: Callable[[], nnx.Module]) -> tuple[Callable[[], Any], LossFn, Predict]:
    """Return (init, loss_fn, predict) of a model with BatchNorm, which normalizes with batch statistics in training."""
    apply, *_ = functional_with_state(nnx.eval_shape(model))

    def predict(params: Any, batch: Any, model_state: Any) -> Predictions:
        return _predictions(apply(params, model_state, batch["image"], False)[0], batch)

    def loss_fn(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Loss, dict[str, Any], Any]:
        logits, model_state = apply(params, model_state, batch["image"], rng is not None)
        predictions = _predictions(logits, batch)
        return predictions.loss(), {"accuracy": predictions.accuracy()}, model_state

    return lambda: functional_with_state(model())[1:], loss_fn, predict


def _predictions(logits: Any, batch: Any) -> Predictions:
    return Predictions(logits, batch["label"], row_weights(batch, len(batch["label"])))


def _names(recipe: ImageRecipe, shape: tuple[int, ...]) -> NameTable:
    if isinstance(recipe, ResNetRecipe):
        return resnet.torch_names(_resnet_config(recipe, shape))
    if isinstance(recipe, CNNRecipe):
        return cnn.torch_names((shape[0], shape[1], shape[2]), recipe.width)
    return mlp.torch_names(2)


def _sharding(recipe: ImageRecipe) -> Any:
    if isinstance(recipe, ResNetRecipe):
        return resnet.SHARDING
    return cnn.SHARDING if isinstance(recipe, CNNRecipe) else mlp.SHARDING


def _images(path: Path | None) -> tuple[Images, Images]:
    if path is None:
        return digits()
    if not path.exists():
        raise UserError(f"{path} does not exist: use an .npz file or a folder with one sub-folder of images per class")
    return image_folder(path) if path.is_dir() else npz(path)
