"""Folders of images, one sub-folder a class, decoded when asked for."""

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

from jaxtrain.data.files import files_under
from jaxtrain.data.holdout import Labels, stratified_split
from jaxtrain.data.source import Example
from jaxtrain.errors import UserError

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp"}
# By no other of Pillow's readers, whatever a file says it is: that of EPS runs Ghostscript.
_FORMATS = ("PNG", "JPEG", "BMP")
_MOST_PIXELS = 2**24  # in float32 and three channels, 192 MiB
_GREY_MODES = {"1", "L"}
_EIGHT_BIT_MODES = _GREY_MODES | {"LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Labelled image files, decoded when asked for: items as those of `Arrays`, float32 [H, W, C] in [0, 1].

    Raises UserError, on access, for a file that cannot be decoded.
    """

    files: tuple[Path, ...]
    labels: Labels  # [N], indices into classes
    classes: tuple[str, ...]
    mode: str  # Pillow's: "L" (C = 1) or "RGB" (C = 3)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> Example:
        with _opened(self.files[index]) as image:
            pixels = np.asarray(image.convert(self.mode), np.float32) / np.float32(255)
        return {"image": pixels.reshape(*pixels.shape[:2], -1), "label": self.labels[index]}


def image_folder(path: str | os.PathLike[str]) -> tuple[ImageFolder, ImageFolder]:
    """A folder with one sub-folder of png, jpg or bmp images a class, as (train, validation).

    Classes are numbered in the order of their sorted names. A tenth of each class is held out. The images
    have one channel if all of them are grey, otherwise three.

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

    Raises UserError if Pillow is missing, if there are no classes or a class has no image, and for the first
    image that is unreadable, of more than 16 million pixels, deeper than 8 bits a channel, or of another size than
    those before.
    """
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give one with a sub-folder of images a class")
    classes = tuple(sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not classes:
        raise UserError(f"{root} has no sub-folders: put each class's images into one of its own")
    of_class = [[f for f in files_under(root / c) if f.suffix.lower() in _IMAGE_SUFFIXES] for c in classes]
    for name, files in zip(classes, of_class, strict=True):
        if not files:
            raise UserError(f"{root / name} holds no png, jpg or bmp image: add some or remove the folder")
    files = [file for group in of_class for file in group]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(group) for group in of_class])
    mode = _common_mode(files)

    def chosen(indices: NDArray[np.intp]) -> ImageFolder:
        return ImageFolder(tuple(files[i] for i in indices), labels[indices], classes, mode)

    train, validation = stratified_split(labels, 0.1)
    return chosen(train), chosen(validation)


def _common_mode(files: Sequence[Path]) -> str:
    """The mode to decode all files in, having read every header and seen one size."""
    modes = set()
    first_size: tuple[int, int] | None = None
    for file in files:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow's doubt about a size
            with _opened(file) as image:
                size, mode = image.size, image.mode
        if mode not in _EIGHT_BIT_MODES:  # Pillow would clip it to 255 without a word
            raise UserError(f"{file} has pixels of mode {mode}: convert it to 8 bits a channel")
        first_size = first_size or size
        if size != first_size:
            raise UserError(
                f"{file} is {size[0]}x{size[1]} but {files[0]} is {first_size[0]}x{first_size[1]}:"
                " resize all images to one size"
            )
        modes.add(mode)
    return "L" if modes <= _GREY_MODES else "RGB"


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The image in the file, its header read. Raises UserError for what goes wrong then, or in its use."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("image folders need Pillow: pip install pillow") from None
    try:
        # MappedSource: of a file Pillow would make room for as much as a chunk is said to be.
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
            Image.open(content, formats=_FORMATS) as image,  # type: ignore[arg-type]
        ):
            if image.width * image.height > _MOST_PIXELS:
                raise UserError(f"{file} is {image.width}x{image.height}, more than can be held: make it smaller")
            yield image
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{file} is not an image that can be read, png, jpg or bmp: mend or remove it") from None
    except Exception as error:  # a SyntaxError for a broken PNG, a DecompressionBombError, and more
        said = str(error) or type(error).__name__
        raise UserError(f"{file} cannot be decoded ({said}): mend or remove it") from None
