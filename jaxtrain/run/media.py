"""Images, audio, texts and tables that a user's functions log: types, checks, and the files that hold them."""

import io
import json
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.errors import UserError

_CHANNELS = 8  # more channels of audio are a transposed array
_HIGHEST_RATE = 10_000_000


@dataclass(frozen=True, eq=False)
class Image:
    """An image to log, stored as PNG.

    Args:
      pixels: uint8, or floating in [0, 1]; [H, W] or [H, W, 1], gray, [H, W, 3], RGB, or [H, W, 4], RGBA.

    Example:
      >>> encode_media({"noise": Image(np.zeros((8, 8)))})["noise"][0].suffix
      'png'
    """

    pixels: Any


@dataclass(frozen=True, eq=False)
class Audio:
    """Audio to log, stored as WAV of 16 bits.

    Args:
      samples: int16, or floating in [-1, 1]; [T], or [T, C] with up to 8 channels.
      rate: Samples per second.

    Example:
      >>> tone = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
      >>> encode_media({"tone": Audio(tone, rate=8000)})["tone"][0].suffix
      'wav'
    """

    samples: Any
    rate: int


@dataclass(frozen=True)
class Text:
    """A text to log, shown verbatim.

    Args:
      text: The text.

    Example:
      >>> encode_media({"answer": [Text("yes"), Text("no")]})["answer"][1].data
      b'no'
    """

    text: str


@dataclass(frozen=True, eq=False)
class Table:
    """A table to log, stored as JSON.

    Args:
      columns: Names of the columns.
      rows: The rows, each with a value per column: a string, a number, a boolean or None. A number that is not finite
        is stored as null.

    Example:
      >>> table = Table(columns=["word", "loss"], rows=[["yes", 0.25], ["no", float("nan")]])
      >>> encode_media({"worst": table})["worst"][0].data
      b'{"columns": ["word", "loss"], "data": [["yes", 0.25], ["no", null]]}'
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


Medium = Image | Audio | Text | Table


class MediaFile(NamedTuple):
    """A medium as the content of a file."""

    suffix: str
    """png, wav, txt or json."""
    data: bytes


Media = Mapping[str, Sequence[MediaFile]]
"""The files to log, by tag."""


def split_media(returned: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, list[MediaFile]]]:
    """Split what `Task.evaluate` returned.

    Args:
      returned: Numbers, media and lists of media, by name.

    Returns:
      A tuple (metrics, media).

    Raises:
      UserError: A value is neither a number nor valid media.
    """
    if not isinstance(returned, Mapping):
        raise UserError(f"Task.evaluate returned {type(returned).__name__}: return a dict, as in {{'error': 0.1}}")
    metrics, media = {}, {}
    for name, value in returned.items():
        if isinstance(value, Medium | list | tuple):
            media[name] = value
        else:
            metrics[name] = _number(name, value)
    return metrics, encode_media(media)


def encode_media(media: Mapping[str, Any]) -> dict[str, list[MediaFile]]:
    """Check media and encode them as files.

    Args:
      media: Images, audio, texts or tables, or lists of one kind, by tag. A `MediaFile` is returned as it is.

    Returns:
      The files, by tag; no tag for an empty list.

    Raises:
      UserError: A value is not valid media; the message names its tag.
    """
    files = {}
    for tag, value in media.items():
        if not isinstance(tag, str) or not tag.strip():
            raise UserError(f"media must have a non-empty string as tag, got {tag!r}")
        if isinstance(value, list | tuple) and not isinstance(value, MediaFile):
            files[tag] = [_encode(f"media {tag!r}[{i}]", one) for i, one in enumerate(value)]
        else:
            files[tag] = [_encode(f"media {tag!r}", value)]
        kinds = {file.suffix for file in files[tag]}
        if len(kinds) > 1:
            raise UserError(f"media {tag!r} mixes {', '.join(sorted(kinds))}: log each kind under a tag of its own")
    return {tag: found for tag, found in files.items() if found}


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels, uint8 [H, W], [H, W, 3] or [H, W, 4], as PNG."""
    from PIL import Image as Pillow

    content = io.BytesIO()
    Pillow.fromarray(pixels).save(content, "png")
    return content.getvalue()


def _encode(name: str, value: Any) -> MediaFile:
    match value:
        case MediaFile():
            return value
        case Image():
            return MediaFile("png", png(_pixels(name, value.pixels)))
        case Audio():
            return MediaFile("wav", _wav(name, value))
        case Text():
            if not isinstance(value.text, str):
                raise UserError(f"{name}: Text takes a string, got {_described(value.text)}: convert it by str()")
            return MediaFile("txt", value.text.encode(errors="replace"))
        case Table():
            return MediaFile("json", json.dumps(_table(name, value), ensure_ascii=False).encode(errors="replace"))
    raise UserError(
        f"{name} is {_described(value)}: wrap it in jaxtrain.Image, jaxtrain.Audio, jaxtrain.Text or jaxtrain.Table"
    )


def _pixels(name: str, given: Any) -> NDArray[np.uint8]:
    x = _array(name, given)
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[-1] not in (1, 3, 4)) or not x.size:
        raise UserError(
            f"{name}: an image has shape [H, W] or [H, W, C] with C = 1, 3 or 4, got {list(x.shape)}: transpose it, or "
            "log a list of images"
        )
    if x.dtype != np.uint8:
        x = _levels(name, x, "an image is uint8, or floating in [0, 1]", low=0, high=1, scale=255).astype(np.uint8)
    return x[..., 0] if x.shape[2:] == (1,) else x


def _wav(name: str, audio: Audio) -> bytes:
    x, rate = _array(name, audio.samples), audio.rate
    if x.ndim not in (1, 2) or not x.size or x.shape[1:] > (_CHANNELS,):
        raise UserError(
            f"{name}: audio has shape [T] or [T, C] with up to {_CHANNELS} channels, got {list(x.shape)}: transpose "
            "it, or log a list of clips"
        )
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not 0 < rate <= _HIGHEST_RATE:
        raise UserError(f"{name}: rate must be a positive integer, the samples per second, got {rate!r}")
    if x.dtype != np.int16:
        x = _levels(name, x, "audio is int16, or floating in [-1, 1]", low=-1, high=1, scale=32767)
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1 if x.ndim == 1 else x.shape[1])
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes(x.astype("<i2").tobytes())
    return content.getvalue()


def _table(name: str, table: Table) -> dict[str, Any]:
    columns = _row(name, "columns", table.columns)
    if not columns or not all(isinstance(column, str) for column in columns):
        raise UserError(f"{name}: the columns of a table are strings, got {columns!r}")
    rows = [_row(name, f"row {i}", row) for i, row in enumerate(_row(name, "rows", table.rows))]
    for i, row in enumerate(rows):
        if len(row) != len(columns):
            raise UserError(f"{name}: row {i} has {len(row)} values for {len(columns)} columns: {row!r}"[:300])
    return {
        "columns": columns,
        "data": [[_cell(f"{name}: row {i}", value) for value in row] for i, row in enumerate(rows)],
    }


def _row(name: str, what: str, given: Any) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise UserError(f"{name}: {what} of a table must be a sequence, got {_described(given)}")
    return list(given)


def _cell(name: str, value: Any) -> str | int | float | None:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(f"{name} holds {_described(value)}: a table holds strings, numbers, booleans and None")


def _array(name: str, given: Any) -> NDArray[Any]:
    try:
        x = np.asarray(given)
    except ValueError as error:
        raise UserError(f"{name}: not an array ({error}): give a rectangular array") from None
    return x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def _levels(name: str, x: NDArray[Any], rule: str, *, low: int, high: int, scale: int) -> NDArray[Any]:
    """Return floating values as whole numbers; those within half a level of the bounds are rounded to them."""
    if not np.issubdtype(x.dtype, np.floating):
        raise UserError(f"{name}: {rule}, got {x.dtype}: convert it")
    if not np.isfinite(x).all():
        at = np.argwhere(~np.isfinite(x))[0].tolist()
        raise UserError(f"{name} holds {x[tuple(at)]} at {at}: log finite values")
    levels = np.round(x * scale)
    if levels.min() < low * scale or levels.max() > high * scale:
        raise UserError(f"{name}: {rule}, got values from {x.min():.4g} to {x.max():.4g}: scale or clip it")
    return levels


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the evaluation's {name!r} is {_described(value)}: return a number, jaxtrain.Image, jaxtrain.Audio, "
            "jaxtrain.Text or jaxtrain.Table"
        ) from None


def _described(value: Any) -> str:
    """Describe a value of a wrong type in a few words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else f'{text[:60]}…'}"
