"""Image classification without running statistics."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.recipes.image import CNNRecipe, ImageRecipe, MLPRecipe


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A file of vectors with labels of three classes."""
    np.savez(tmp_path / "flat.npz", x=np.zeros((20, 5), np.float32), y=np.arange(20) % 3)
    return tmp_path / "flat.npz"


def test_class_entropy_is_that_of_the_validation_labels(flat: Path) -> None:
    task = MLPRecipe(hidden=4, data=flat, classes=4).task()
    p = np.bincount(task.validation.labels) / len(task.validation)
    assert task.references["class entropy"] == float(p @ np.log(1 / p))
    assert task.class_names == ["0", "1", "2", "3"]
    assert task.params["layers"][0]["kernel"].shape == (5, 4)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        (CNNRecipe, {}, r"images must have at least 3×3 pixels, got shape \[5\]: use digits-mlp"),
        (MLPRecipe, {"classes": 2}, r"label 2 is outside 0\.\.1"),
        (MLPRecipe, {"data": Path("nowhere")}, "nowhere does not exist: use an .npz file or a folder"),
    ],
)
def test_invalid_images_are_refused(recipe: type[ImageRecipe], settings: dict, message: str, flat: Path) -> None:
    with pytest.raises(UserError, match=message):
        recipe(**{"data": flat, **settings}).task()


@pytest.mark.parametrize("recipe", [CNNRecipe, MLPRecipe])
def test_the_exported_inputs_are_those_of_an_example(recipe: type[ImageRecipe]) -> None:
    task = recipe().task()
    image = task.validation[0]["image"]
    assert task.signature is not None
    inputs = {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in task.signature.inputs.items()}
    assert inputs == {"image": (image.shape, image.dtype)}


@pytest.mark.parametrize("height", [2, 3])
@pytest.mark.parametrize("width", [2, 3])
def test_the_smallest_images_have_3_by_3_pixels(height: int, width: int) -> None:
    with contextlib.nullcontext() if height == width == 3 else pytest.raises(UserError, match="at least 3×3 pixels"):
        CNNRecipe().model((height, width, 1))
