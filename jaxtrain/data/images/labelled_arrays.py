"""Labeled arrays in memory: scikit-learn's digits and .npz files."""

import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files.archive import check_zip, is_zip
from jaxtrain.data.holdout import Labels, stratified_split
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError, warn_user
from jaxtrain.records import report_unread

Keys = tuple[str, str]  # the names of images and labels in an npz file

_TRAIN_KEYS = (("x", "y"), ("image", "label"), ("x_train", "y_train"))
_CHANNELS = (1, 3, 4)
_VALIDATION_KEYS = (("x_test", "y_test"), ("x_val", "y_val"))


@dataclass(frozen=True, eq=False)
class Arrays:
    """Labeled examples in memory: item `i` is `{"image": images[i], "label": labels[i]}`.

    Args:
      images: float32 or uint8 [N, H, W, C], or [N, ...].
      labels: int32 [N].

    Raises:
      UserError: The lengths differ.

    Example:
      >>> Arrays(np.zeros((2, 8, 8, 1), np.float32), np.array([3, 1], np.int32))[1]["label"]
      np.int32(1)
    """

    images: NDArray[np.float32 | np.uint8]
    labels: Labels

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise UserError(f"got {len(self.images)} images and {len(self.labels)} labels: lengths must match")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> Example:
        return {"image": self.images[index], "label": self.labels[index]}


def digits(validation_fraction: float = 0.1) -> tuple[Arrays, Arrays]:
    """Load scikit-learn's 1797 handwritten digits.

    Args:
      validation_fraction: Fraction of every class that is held out.

    Returns:
      A tuple (train, validation), images float32 [N, 8, 8, 1] in [0, 1].

    Raises:
      UserError: scikit-learn is not installed.

    Example:
      >>> train, validation = digits()
      >>> len(train) + len(validation), train[0]["image"].shape
      (1797, (8, 8, 1))
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits need scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    images = (bunch.images[..., None] / 16).astype(np.float32)
    return _split_arrays(Arrays(images, bunch.target.astype(np.int32)), validation_fraction)


def npz(path: str | os.PathLike[str]) -> tuple[Arrays, Arrays]:
    """Load images and labels from an `.npz` file.

    It reads the arrays `x` and `y` (or `image`/`label`, `x_train`/`y_train`), and `x_test` and `y_test` (or
    `x_val`/`y_val`) for validation; without these a tenth of every class is held out. Pickled arrays are refused.

    Args:
      path: File written by `numpy.savez` or `numpy.savez_compressed`.

    Returns:
      A tuple (train, validation). uint8 images stay uint8, which `pixels` scales to [0, 1] on the device; other numbers
      become float32. [N, H, W] becomes [N, H, W, 1].

    Raises:
      UserError: The file is missing, not an npz, or unpacks to far more than its size or its headers state; or an array
        is missing, empty, of objects, not finite or not exact in float32, the lengths differ, the images of validation
        are of another shape or dtype, or the labels are not integers [N].

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(f"{folder}/data.npz", x=np.full((20, 4, 4), 255, np.uint8), y=np.arange(20) % 2)
      ...     train, validation = npz(f"{folder}/data.npz")
      >>> train.images.shape, str(train.images.dtype), len(validation)
      ((18, 4, 4, 1), 'uint8', 2)
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} is not a file: use one written by numpy.savez")
    if not is_zip(file):
        raise UserError(f"{file} is not an npz file: write one with numpy.savez(path, x=images, y=labels)")
    check_zip(file)
    with zipfile.ZipFile(file) as archive:
        train_keys = _present_pair(archive, _TRAIN_KEYS) or _TRAIN_KEYS[0]
        train = _read_pair(archive, file, train_keys)
        validation_keys = _present_pair(archive, _VALIDATION_KEYS)
        report_unread(file, {*_arrays(archive)} - {*train_keys, *(validation_keys or ())}, what="arrays")
        if validation_keys is None:
            return _split_arrays(train, 0.1)
        validation = _read_pair(archive, file, validation_keys)
    ours, theirs = ((x.images.dtype.name, list(x.images.shape[1:])) for x in (train, validation))
    if ours != theirs:
        raise UserError(
            f"{file}: {train_keys[0]!r} has images of {ours[0]} {ours[1]} and {validation_keys[0]!r} of {theirs[0]}"
            f" {theirs[1]}: save both alike"
        )
    return train, validation


def check_labels(source_labels: NDArray[np.integer[Any]], classes: int) -> None:
    """Validate that labels are in [0, classes); JAX would silently clamp or mask others.

    Args:
      source_labels: Integers [N].
      classes: Number of classes.

    Raises:
      UserError: A label is out of range.

    Example:
      >>> check_labels(np.array([0, 1, 3]), classes=3)
      Traceback (most recent call last):
      jaxtrain.errors.UserError: label 3 is outside 0..2 (1 of 3 labels are): fix it or set the number of classes
    """
    outside = source_labels[(source_labels < 0) | (source_labels >= classes)]
    if len(outside):
        raise UserError(
            f"label {outside[0]} is outside 0..{classes - 1} ({len(outside)} of {len(source_labels)} labels are):"
            " fix it or set the number of classes"
        )


def _present_pair(archive: zipfile.ZipFile, pairs: tuple[Keys, ...]) -> Keys | None:
    """Return the first pair of names of which the archive has at least one."""
    return next((pair for pair in pairs if not set(_arrays(archive)).isdisjoint(pair)), None)


def _arrays(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the arrays, as `numpy.load` has them."""
    return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _read_pair(archive: zipfile.ZipFile, file: Path, keys: Keys) -> Arrays:
    images, labels = (_read_array(archive, file, key) for key in keys)
    where = f"{file}: {keys[1]!r}"
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise UserError(f"{where} is {labels.dtype} {list(labels.shape)}: save integers of shape [N]")
    if images.dtype.kind not in "biuf" or images.ndim == 0:
        raise UserError(f"{file}: {keys[0]!r} is {images.dtype} {list(images.shape)}: save numbers [N, ...]")
    if len(images) != len(labels):
        raise UserError(f"{where} has {len(labels)} labels for {len(images)} images: lengths must match")
    if max(abs(int(labels.min())), int(labels.max())) > np.iinfo(np.int32).max:
        raise UserError(f"{where} runs from {labels.min()} to {labels.max()}, beyond int32: number the classes from 0")
    if images.dtype != np.uint8:
        with np.errstate(over="ignore"):
            narrow = images.astype(np.float32)
        if not np.isfinite(narrow).all():
            raise UserError(f"{file}: {keys[0]!r} holds inf or NaN in float32: fix the data")
        if images.dtype.kind in "iu" and (lost := narrow.astype(images.dtype) != images).any():
            raise UserError(f"{file}: {keys[0]!r} holds {images[lost][0]}, which float32 rounds: use smaller integers")
        images = narrow
    if images.ndim == 4 and images.shape[1] in _CHANNELS and images.shape[3] not in _CHANNELS:
        _, height, width, channels = images.shape
        warn_user(
            f"{file}: {keys[0]!r} is read as images of {height}x{width} pixels with {channels} channels: if channels"
            " are first, as in PyTorch, save x.transpose(0, 2, 3, 1)"
        )
    return Arrays(images[..., None] if images.ndim == 3 else images, labels.astype(np.int32))


def _read_array(archive: zipfile.ZipFile, file: Path, key: str) -> NDArray[Any]:
    if key not in _arrays(archive):
        present = ", ".join(_arrays(archive)) or "nothing"
        raise UserError(f"{file} has no array {key!r}, only {present}: save images as x and labels as y")
    where, member = f"{file}: {key!r}", archive.getinfo(f"{key}.npy")
    try:
        with archive.open(member) as stream:
            shape, dtype = _read_header(stream)
            data_bytes = member.file_size - stream.tell()
        if dtype.hasobject:
            raise UserError(f"{where} is an array of objects: save it as an array of numbers")
        # Before numpy allocates what the header states.
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != data_bytes:
            raise UserError(f"{where} is {dtype} {list(shape)} by its header, but has {data_bytes} bytes: save again")
        if not data_bytes:
            raise UserError(f"{where} is empty, of shape {list(shape)}: save at least one example")
        with archive.open(member) as stream:
            array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib and the header parsers raise many types
        raise UserError(f"{where} cannot be read ({error}): write the file again") from None
    return array


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return (shape, dtype) of the `.npy` in a stream. Version 3.0 exists for field names and is not supported."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f".npy version {version}")
    return shape, dtype


def _split_arrays(arrays: Arrays, validation_fraction: float) -> tuple[Arrays, Arrays]:
    train, validation = stratified_split(arrays.labels, validation_fraction)
    return (
        Arrays(arrays.images[train], arrays.labels[train]),
        Arrays(arrays.images[validation], arrays.labels[validation]),
    )
