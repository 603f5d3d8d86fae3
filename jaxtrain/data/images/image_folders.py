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

from jaxtrain.data.files.listing import files_under
from jaxtrain.data.files.splits import TRAIN_SPLITS, VALIDATION_SPLITS
from jaxtrain.data.holdout import Labels, stratified_split
from jaxtrain.data.images.labelled_arrays import Arrays, digits, npz
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError
from jaxtrain.records import report_unread

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp"}
_OTHER_SUFFIXES = {".webp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".ppm", ".pgm", ".jp2", ".ico", ".tga"}
# No other reader of Pillow is allowed, because the one for EPS runs Ghostscript.
_FORMATS = ("PNG", "JPEG", "BMP")
_ORIENTATION, _TURNED = 0x0112, range(5, 9)  # the tag of EXIF, and its values with exchanged sides
_MAX_PIXELS = 2**24  # 192 MiB in float32 with three channels
_GRAY_MODES = {"1", "L"}
_TRANSPARENT_MODES = {"LA", "PA", "RGBA"}
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
            decoded = np.array(_upright(image).convert(self.mode), np.uint8)
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

    Classes are numbered in the order of their sorted names, and a tenth of every class is held out. A folder with
    `train` and `validation` (or `valid`, `val`, `dev`, `eval`, `test`), each with such sub-folders, is held out as it
    says. Images have one channel if all of them are gray, otherwise three; JPEGs are turned as their EXIF
    orientation says, and transparency is not read. Other files are named in a warning.

    Args:
      path: Folder.

    Returns:
      A tuple (train, validation).

    Raises:
      UserError: Pillow is not installed, there are no classes, a class has no image or is not in the training split, or
        an image is unreadable, of another format, has more than 16 million pixels or more than 8 bits per channel, or
        differs in size from those before it.

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
    folder, held_out = _splits(root)
    classes = tuple(path.name for path in _subfolders(folder))
    if not classes:
        raise UserError(f"{root} has no sub-folders: put the images of each class into one")
    files, labels = _labeled_files(folder, classes, root)
    if held_out is None:
        mode = _common_mode(files, root)
        train, validation = stratified_split(labels, 0.1)
    else:
        more, numbers = _held_out_files(held_out, classes, folder)
        train, validation = np.arange(len(files)), len(files) + np.arange(len(more))
        files, labels = files + more, np.concatenate([labels, numbers])
        mode = _common_mode(files, root)

    def subset(indices: NDArray[np.intp]) -> ImageFolder:
        return ImageFolder(tuple(files[i] for i in indices), labels[indices], classes, mode)

    return subset(train), subset(validation)


def _subfolders(folder: Path) -> list[Path]:
    # macOS puts its own metadata into a folder of every zip archive.
    hidden = (".", "__MACOSX")
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(hidden))


def _splits(root: Path) -> tuple[Path, Path | None]:
    """Return the folders with a sub-folder per class, of training and of validation, if it is apart."""
    by_name = {path.name.lower(): path for path in _subfolders(root)}
    train = next((by_name[name] for name in TRAIN_SPLITS if name in by_name), None)
    named = [by_name[name] for name in VALIDATION_SPLITS if name in by_name]
    held_out = next((path for path in named if _subfolders(path)), None)
    if len(by_name) == 1 and train is None and _subfolders(only := next(iter(by_name.values()))):
        raise UserError(f"{root} has one sub-folder, with sub-folders of its own: use {only}, or a folder of classes")
    if train is not None and by_name.keys() <= {*TRAIN_SPLITS, *VALIDATION_SPLITS} and not _subfolders(train):
        raise UserError(f"{train} has no sub-folders: put the images of each class into one, in every split")
    if train is None or not _subfolders(train) or (held_out is None and len(by_name) > 1 + len(named)):
        if shared := _shared_subfolders([*by_name.values()]):
            raise UserError(
                f"all sub-folders of {root} have the sub-folders {', '.join(shared)}: use one of them, or name them"
                " train and validation"
            )
        return root, None
    used = (train, held_out)
    report_unread(root, [path.name for path in by_name.values() if path not in used], what="folders")
    return train, held_out


def _shared_subfolders(folders: Sequence[Path]) -> list[str]:
    """Return the names of sub-folders that two or more folders all have; none where a folder has images of its own."""
    names = [{path.name for path in _subfolders(folder)} for folder in folders]
    if len(folders) < 2 or len(names[0]) < 2 or any(own != names[0] for own in names):
        return []
    has_images = any(path.suffix.lower() in _IMAGE_SUFFIXES for folder in folders for path in folder.iterdir())
    return [] if has_images else sorted(names[0])


def _labeled_files(folder: Path, classes: Sequence[str], root: Path) -> tuple[list[Path], Labels]:
    """Return the images of the classes, in their order, and the numbers of these. Names the other files."""
    under = [files_under(folder / name) for name in classes]
    of_class = [[file for file in files if file.suffix.lower() in _IMAGE_SUFFIXES] for files in under]
    for name, files in zip(classes, of_class, strict=True):
        if not files:
            raise UserError(f"{folder / name} has no png, jpg or bmp image: add some or remove the folder")
    loose = [path for place in {root, folder} for path in place.iterdir() if path.is_file()]
    others = [file for files in (*under, loose) for file in files if file.suffix.lower() not in _IMAGE_SUFFIXES]
    if wrong := next((file for file in others if file.suffix.lower() in _OTHER_SUFFIXES), None):
        raise UserError(f"{wrong} is neither png, jpg nor bmp: convert it, or remove it")
    unread = [file for file in (*loose, *others) if not file.name.startswith(".")]
    report_unread(root, [file.relative_to(root).as_posix() for file in unread], what="files")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(files) for files in of_class])
    return [file for files in of_class for file in files], labels


def _held_out_files(held_out: Path, classes: Sequence[str], folder: Path) -> tuple[list[Path], Labels]:
    """Return the images of the classes of `folder` in a split, and the numbers of their classes."""
    if strange := {path.name for path in _subfolders(held_out)} - {*classes}:
        raise UserError(
            f"{held_out / min(strange)} is no class of {folder}: name the sub-folders of both alike, one per class"
        )
    present = tuple(name for name in classes if (held_out / name).is_dir())
    files, numbers = _labeled_files(held_out, present, held_out)
    return files, np.array([classes.index(name) for name in present], np.int32)[numbers]


def _upright(image: Any) -> Any:
    """Return a JPEG turned as its EXIF orientation says."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image) if image.format == "JPEG" else image


def _common_mode(files: Sequence[Path], root: Path) -> str:
    """Return the mode to decode all files in. Reads every header and validates that the sizes are equal."""
    modes, transparent = set(), 0
    first_size: tuple[int, int] | None = None
    for file in files:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of suspicious sizes
            with _opened(file) as image:
                size, mode = image.size, image.mode
                transparent += mode in _TRANSPARENT_MODES or "transparency" in image.info
                # Pillow decodes a PNG to look for one.
                if image.format == "JPEG" and image.getexif().get(_ORIENTATION, 1) in _TURNED:
                    size = size[::-1]
        if mode not in _EIGHT_BIT_MODES:  # Pillow would silently clip it to 255
            raise UserError(f"{file} has pixels of mode {mode}: convert it to 8 bits a channel")
        first_size = first_size or size
        if size != first_size:
            raise UserError(
                f"{file} is {size[0]}x{size[1]} but {files[0]} is {first_size[0]}x{first_size[1]}:"
                " resize all images to one size"
            )
        modes.add(mode)
    report_unread(root, [f"the transparency of {transparent:,} images"] if transparent else [], what="channels")
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
