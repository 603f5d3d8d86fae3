"""Random-access sources of examples: bytes of text, arrays, and folders of images.

A source has a length and answers `source[i]` with one example, a dict of numpy arrays. Nothing is read when
this module is imported, and every source can be pickled.
"""

import hashlib
import os
import sysconfig
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.errors import UserError

Example = dict[str, Any]  # name -> numpy array or numpy scalar, without a batch axis
Bytes = NDArray[np.uint8]
Labels = NDArray[np.int32]
Keys = tuple[str, str]  # the names of images and labels in an npz file


class Source(Protocol):
    """Anything with a length whose items are examples of one shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


# --- text ---------------------------------------------------------------------------------------------------

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
# Distributions strip these, so a corpus with them would differ from one machine to the next.
_OFTEN_STRIPPED = {"test", "tests", "idle_test", "lib2to3"}
_SNIFFED = 8 * 1024  # bytes


@dataclass(frozen=True, eq=False)
class Text:
    """Windows of `seq_len` predictions each over a run of bytes.

    Item `i` is `{"tokens": int32[seq_len + 1]}`, starting at byte `i * seq_len`: the inputs are `tokens[:-1]`
    and the targets `tokens[1:]`. Neighbours share one byte, so every byte but the first is a target once; an
    incomplete last window is left out.

    >>> text = Text(np.frombuffer(b"abcdefgh", np.uint8), seq_len=3)
    >>> [bytes(window["tokens"].tolist()) for window in text]
    [b'abcd', b'defg']

    Raises UserError if `seq_len` is below 1 or the text is shorter than one window.
    """

    tokens: Bytes
    seq_len: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UserError(f"seq_len is {self.seq_len}: choose 1 or more")
        if len(self.tokens) <= self.seq_len:
            raise UserError(
                f"the text has {len(self.tokens)} bytes but one window of seq_len {self.seq_len} needs"
                f" {self.seq_len + 1}: give more text or a shorter seq_len"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        return {"tokens": self.tokens[start : start + self.seq_len + 1].astype(np.int32)}


def stdlib_files() -> list[Path]:
    """The sources of the running Python's standard library, sorted by path, without tests.

    >>> any(path.name == "dataclasses.py" for path in stdlib_files())
    True

    Raises UserError if this Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in _files_under(root, _NOT_THE_LIBRARY | _OFTEN_STRIPPED) if f.suffix == ".py"]
    if not files:
        raise UserError(f"{root} holds no Python source: give a text file or folder of your own")
    return files


def text_files(path: str | os.PathLike[str]) -> list[Path]:
    """`path` itself, or every text file under it, sorted by path.

    Hidden, empty and unreadable files are passed over, and so are those with a NUL byte in their first 8 KiB.

    >>> [file.name for file in text_files(os.__file__)]
    ['os.py']

    Raises UserError if `path` does not exist or no text is left.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{root} does not exist: give a text file or a folder of text files")
    files = [f for f in ([root] if root.is_file() else _files_under(root)) if _is_text(f)]
    if not files:
        raise UserError(f"{root} holds no text that can be read: give a non-empty text file or folder")
    return files


def split_text(
    files: Sequence[Path], root: str | os.PathLike[str], validation_fraction: float = 0.1
) -> tuple[Bytes, Bytes]:
    """The bytes of `files` as (train, validation), each uint8, split by whole files.

    The files with the smallest hash of their path below `root` are the validation files, so the split depends
    on names alone. A single file is cut in two instead, validation last.

    >>> train, validation = split_text(text_files(os.__file__), Path(os.__file__).parent)
    >>> 0 < len(validation) < len(train)
    True

    Raises UserError if the fraction is not between 0 and 1, or if either part would be empty.
    """
    _check_fraction(validation_fraction)
    contents = [file.read_bytes() for file in files]
    if len(files) == 1:
        cut = len(contents[0]) - _share(len(contents[0]), validation_fraction)
        parts = contents[0][:cut], contents[0][cut:]
    else:
        by_hash = sorted(range(len(files)), key=lambda i: _path_hash(files[i].relative_to(root)))
        held_out = set(by_hash[: _share(len(files), validation_fraction)])
        parts = (
            b"".join(content for i, content in enumerate(contents) if i not in held_out),
            b"".join(content for i, content in enumerate(contents) if i in held_out),
        )
    if not all(parts):
        raise UserError(f"the text in {root} is too short to split into train and validation: give more text")
    return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)


def unigram_entropy(tokens: Bytes) -> float:
    """The loss, in nats per byte, of the best model that ignores context: a line any other model must beat.

    >>> round(unigram_entropy(np.frombuffer(b"abab", np.uint8)), 6)  # log 2
    0.693147
    """
    counts = np.bincount(tokens)
    p = counts[counts > 0] / len(tokens)
    return float(p @ np.log(1 / p))


def _files_under(root: Path, skipped_folders: set[str] | frozenset[str] = frozenset()) -> list[Path]:
    """Every regular file below `root` that is not hidden, sorted by relative POSIX path."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped_folders]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((f for f in files if os.path.isfile(f)), key=lambda f: f.relative_to(root).as_posix())


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            start = stream.read(_SNIFFED)
    except OSError:
        return False
    return bool(start) and b"\0" not in start


def _path_hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.as_posix())).digest()


# --- arrays -------------------------------------------------------------------------------------------------

_TRAIN_KEYS = (("x", "y"), ("image", "label"), ("x_train", "y_train"))
_VALIDATION_KEYS = (("x_test", "y_test"), ("x_val", "y_val"))


@dataclass(frozen=True, eq=False)
class Arrays:
    """Labelled examples in memory: item `i` is `{"image": images[i], "label": labels[i]}`.

    >>> Arrays(np.zeros((2, 8, 8, 1), np.float32), np.array([3, 1], np.int32))[1]["label"]
    np.int32(1)

    Raises UserError if the lengths differ.
    """

    images: NDArray[np.float32]  # [N, H, W, C], or [N, ...]
    labels: Labels  # [N]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise UserError(f"{len(self.images)} images but {len(self.labels)} labels: give as many")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> Example:
        return {"image": self.images[index], "label": self.labels[index]}


def digits(validation_fraction: float = 0.1) -> tuple[Arrays, Arrays]:
    """scikit-learn's 1797 handwritten digits, float32 [N, 8, 8, 1] in [0, 1], as (train, validation).

    >>> train, validation = digits()
    >>> len(train) + len(validation), train[0]["image"].shape
    (1797, (8, 8, 1))

    Raises UserError if scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits need scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    images = (bunch.images[..., None] / 16).astype(np.float32)
    return _split_arrays(Arrays(images, bunch.target.astype(np.int32)), validation_fraction)


def npz(path: str | os.PathLike[str]) -> tuple[Arrays, Arrays]:
    """An `.npz` file's arrays as (train, validation).

    Reads `x`/`y` (or `image`/`label`, `x_train`/`y_train`) and, where they are there, `x_test`/`y_test` (or
    `x_val`/`y_val`) for validation; otherwise a tenth of each class is held out. uint8 pixels become float32
    in [0, 1], other numbers only float32; [N, H, W] becomes [N, H, W, 1]. Nothing pickled is ever loaded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/data.npz", x=np.full((20, 4, 4), 255, np.uint8), y=np.arange(20) % 2)
    ...     train, validation = npz(f"{folder}/data.npz")
    >>> train.images.shape, float(train.images.max()), len(validation)
    ((18, 4, 4, 1), 1.0, 2)

    Raises UserError if the file is missing or no npz, and if an array is missing, empty, of objects, of
    another length than its partner, or, for labels, not of integers [N].
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} is not a file: give one written by numpy.savez")
    if not zipfile.is_zipfile(file):
        raise UserError(f"{file} is not an npz file: write one with numpy.savez(path, x=images, y=labels)")
    with np.load(file, allow_pickle=False) as archive:
        train = _read_pair(archive, file, _present_pair(archive, _TRAIN_KEYS) or _TRAIN_KEYS[0])
        validation_keys = _present_pair(archive, _VALIDATION_KEYS)
        if validation_keys is None:
            return _split_arrays(train, 0.1)
        return train, _read_pair(archive, file, validation_keys)


def check_labels(source_labels: NDArray[np.integer[Any]], classes: int) -> None:
    """Nothing, if every label lies in 0..classes-1.

    >>> check_labels(np.array([0, 1, 3]), classes=3)
    Traceback (most recent call last):
    jaxtrain.errors.UserError: label 3 lies outside 0..2 (1 of 3 labels do): mend it or set the number of classes

    Raises UserError naming one that does not: JAX would clamp or mask it and train on, without a word.
    """
    outside = source_labels[(source_labels < 0) | (source_labels >= classes)]
    if len(outside):
        raise UserError(
            f"label {outside[0]} lies outside 0..{classes - 1} ({len(outside)} of {len(source_labels)} labels do):"
            " mend it or set the number of classes"
        )


def _present_pair(archive: np.lib.npyio.NpzFile, pairs: tuple[Keys, ...]) -> Keys | None:
    """The first pair of names of which the archive has at least one."""
    return next((pair for pair in pairs if not set(archive.files).isdisjoint(pair)), None)


def _read_pair(archive: np.lib.npyio.NpzFile, file: Path, keys: Keys) -> Arrays:
    images, labels = (_read_array(archive, file, key) for key in keys)
    where = f"{file}: {keys[1]!r}"
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise UserError(f"{where} is {labels.dtype} {list(labels.shape)}: save integers of shape [N]")
    if images.dtype.kind not in "biuf" or images.ndim == 0:
        raise UserError(f"{file}: {keys[0]!r} is {images.dtype} {list(images.shape)}: save numbers [N, ...]")
    if len(images) != len(labels):
        raise UserError(f"{where} has {len(labels)} labels for {len(images)} images: save as many")
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    pixels = images.astype(np.float32) / scale
    return Arrays(pixels[..., None] if pixels.ndim == 3 else pixels, labels.astype(np.int32))


def _read_array(archive: np.lib.npyio.NpzFile, file: Path, key: str) -> NDArray[Any]:
    if key not in archive.files:
        present = ", ".join(archive.files) or "nothing"
        raise UserError(f"{file} has no array {key!r}, only {present}: save images as x and labels as y")
    try:
        array = np.asarray(archive[key])
    except ValueError:  # numpy's refusal to unpickle
        raise UserError(f"{file}: {key!r} is an array of objects: save it as an array of numbers") from None
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file}: {key!r} cannot be read ({error}): write the file again") from None
    if not array.size:
        raise UserError(f"{file}: {key!r} is empty, of shape {list(array.shape)}: save at least one example")
    return array


# --- folders of images --------------------------------------------------------------------------------------

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp"}
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
        from PIL import Image

        try:
            with Image.open(self.files[index]) as image:
                pixels = np.asarray(image.convert(self.mode), np.float32) / np.float32(255)
        except (OSError, SyntaxError) as error:  # Pillow calls a broken PNG a SyntaxError
            raise UserError(f"{self.files[index]} cannot be decoded ({error}): mend or remove it") from None
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
    image that is unreadable, deeper than 8 bits a channel, or of another size than those before.
    """
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give one with a sub-folder of images a class")
    classes = tuple(sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not classes:
        raise UserError(f"{root} has no sub-folders: put each class's images into one of its own")
    of_class = [[f for f in _files_under(root / c) if f.suffix.lower() in _IMAGE_SUFFIXES] for c in classes]
    for name, files in zip(classes, of_class, strict=True):
        if not files:
            raise UserError(f"{root / name} holds no png, jpg or bmp image: add some or remove the folder")
    files = [file for group in of_class for file in group]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(group) for group in of_class])
    mode = _common_mode(files)

    def chosen(indices: NDArray[np.intp]) -> ImageFolder:
        return ImageFolder(tuple(files[i] for i in indices), labels[indices], classes, mode)

    train, validation = _stratified_split(labels, 0.1)
    return chosen(train), chosen(validation)


def _common_mode(files: Sequence[Path]) -> str:
    """The mode to decode all files in, having read every header and seen one size."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("image folders need Pillow: pip install pillow") from None
    modes = set()
    first_size: tuple[int, int] | None = None
    for file in files:
        try:
            with Image.open(file) as image:
                size, mode = image.size, image.mode
        except (OSError, SyntaxError):
            raise UserError(f"{file} is not an image that can be read: mend or remove it") from None
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


# --- splitting ----------------------------------------------------------------------------------------------


def _split_arrays(arrays: Arrays, validation_fraction: float) -> tuple[Arrays, Arrays]:
    train, validation = _stratified_split(arrays.labels, validation_fraction)
    return (
        Arrays(arrays.images[train], arrays.labels[train]),
        Arrays(arrays.images[validation], arrays.labels[validation]),
    )


def _stratified_split(labels: Labels, fraction: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Sorted indices of (train, validation); a class of two or more has an example in each."""
    _check_fraction(fraction)
    # RandomState's stream is frozen; default_rng's may change with numpy and move examples across the split.
    stream = np.random.RandomState(0)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out[stream.permutation(members)[: _share(len(members), fraction)]] = True
    if not held_out.any():
        raise UserError(f"{len(labels)} examples leave none for validation: give two or more of some class")
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _share(count: int, fraction: float) -> int:
    """`fraction` of `count`, but at least one and not all of them; none of one."""
    return min(max(1, round(count * fraction)), count - 1) if count else 0


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction is {fraction}: choose a number between 0 and 1")
