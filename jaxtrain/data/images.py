"""Folders of images with one sub-folder per class, decoded on access."""

import contextlib
import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.arrays import Arrays, digits, npz
from jaxtrain.data.files import files_under
from jaxtrain.data.holdout import Labels, stratified_split
from jaxtrain.data.source import Example
from jaxtrain.errors import UserError

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp"}
# No other reader of Pillow is allowed, because the one for EPS runs Ghostscript.
_FORMATS = ("PNG", "JPEG", "BMP")
_MAX_PIXELS = 2**24  # 192 MiB in float32 with three channels
_GRAY_MODES = {"1", "L"}
_EIGHT_BIT_MODES = _GRAY_MODES | {"LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Labeled image files, decoded on access: items as those of `Arrays`, uint8 [H, W, C] for `pixels` to scale.

    Args:
      files: Image files.
      labels: Indices into `classes`, int32 [N].
      classes: Names of the classes.
      mode: Mode of Pillow to decode in: "L" (C = 1) or "RGB" (C = 3).

    Raises:
      UserError: On access, if a file cannot be decoded.
    """

    files: tuple[Path, ...]
    labels: Labels
    classes: tuple[str, ...]
    mode: str

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> Example:
        with _opened(self.files[index]) as image:
            decoded = np.array(image.convert(self.mode), np.uint8)
        return {"image": decoded.reshape(*decoded.shape[:2], -1), "label": self.labels[index]}


def split_images(path: Path | None) -> tuple[Arrays | ImageFolder, Arrays | ImageFolder]:
    """Load labeled images as (train, validation).

    Args:
      path: File for `npz`, or folder for `image_folder`; None for scikit-learn's `digits`.

    Raises:
      UserError: The path does not exist, or cannot be loaded.
    """
    if path is None:
        return digits()
    if not path.exists():
        raise UserError(f"{path} does not exist: use an .npz file or a folder with one sub-folder of images per class")
    return image_folder(path) if path.is_dir() else npz(path)


def image_folder(path: str | os.PathLike[str]) -> tuple[ImageFolder, ImageFolder]:
    """Load a folder with one sub-folder of png, jpg or bmp images per class.

    Classes are numbered in the order of their sorted names, and a tenth of every class is held out. Images have one
    channel if all of them are gray, otherwise three.

    Args:
      path: Folder.

    Returns:
      A tuple (train, validation).

    Raises:
      UserError: Pillow is not installed, there are no classes, a class has no image, or an image is unreadable, has
        more than 16 million pixels or more than 8 bits per channel, or differs in size from those before it.

    Example:
      >>> import tempfile
      >>> from PIL import Image
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("cat", "dog"):
      ...         Path(folder, name).mkdir()
      ...         for i in range(10):
      ...             Image.new("RGB", (4, 2)).save(f"{folder}/{name}/{i}.png")
      ...     train, validation = image_folder(folder)
      ...     train.classes, len(train), len(validation), train[0]["image"].shape
      (('cat', 'dog'), 18, 2, (2, 4, 3))
    """
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: use one with a sub-folder of images per class")
    classes = tuple(sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not classes:
        raise UserError(f"{root} has no sub-folders: put the images of each class into one")
    of_class = [[f for f in files_under(root / c) if f.suffix.lower() in _IMAGE_SUFFIXES] for c in classes]
    for name, files in zip(classes, of_class, strict=True):
        if not files:
            raise UserError(f"{root / name} has no png, jpg or bmp image: add some or remove the folder")
    files = [file for group in of_class for file in group]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(group) for group in of_class])
    mode = _common_mode(files)

    def subset(indices: NDArray[np.intp]) -> ImageFolder:
        return ImageFolder(tuple(files[i] for i in indices), labels[indices], classes, mode)

    train, validation = stratified_split(labels, 0.1)
    return subset(train), subset(validation)


def _common_mode(files: Sequence[Path]) -> str:
    """Return the mode to decode all files in. Reads every header and validates that the sizes are equal."""
    modes = set()
    first_size: tuple[int, int] | None = None
    for file in files:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of suspicious sizes
            with _opened(file) as image:
                size, mode = image.size, image.mode
        if mode not in _EIGHT_BIT_MODES:  # Pillow would silently clip it to 255
            raise UserError(f"{file} has pixels of mode {mode}: convert it to 8 bits a channel")
        first_size = first_size or size
        if size != first_size:
            raise UserError(
                f"{file} is {size[0]}x{size[1]} but {files[0]} is {first_size[0]}x{first_size[1]}:"
                " resize all images to one size"
            )
        modes.add(mode)
    return "L" if modes <= _GRAY_MODES else "RGB"


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an image and read its header; errors here and in the body of the `with` become UserError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("image folders need Pillow: pip install pillow") from None
    try:
        # Memory-mapped, because from a file Pillow allocates as much as the header of a chunk states.
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
            Image.open(content, formats=_FORMATS) as image,  # type: ignore[arg-type]
        ):
            if image.width * image.height > _MAX_PIXELS:
                raise UserError(
                    f"{file} is {image.width}x{image.height}, more than {_MAX_PIXELS:,} pixels: make it smaller"
                )
            yield image
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{file} is not a readable png, jpg or bmp image: fix or remove it") from None
    except Exception as error:  # SyntaxError for a broken PNG, DecompressionBombError, and more
        reason = str(error) or type(error).__name__
        raise UserError(f"{file} cannot be decoded ({reason}): fix or remove it") from None
