"""The types of the values of a line of metrics.jsonl, which may come from another program."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.fields import brief
from jaxtrain.step import PrecisionLosses

MEDIA, PRECISION = "media", "precision"
_MOST_STEPS = 2**53
_WHOLE = {"step", "skipped", "rolled_back_from", "rolled_back_to", "batches_skipped"}
_FORMATS = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


def check_line(line: Any) -> None:
    """Check the types of a line.

    Args:
      line: What the line contains, as JSON.

    Raises:
      ValueError: A value is not what its key stands for.

    Example:
      >>> check_line({"step": 3, "loss": None, "mine": 2.5})
      >>> check_line({"step": 3, "loss": "0.1"})
      Traceback (most recent call last):
      ValueError: loss must be a number or null, got '0.1'
    """
    if not isinstance(line, dict):
        raise ValueError(f"an object is expected, got {brief(line)}")
    if "step" not in line:
        raise ValueError("step is missing")
    for key, value in line.items():
        if key == MEDIA:
            _check_media(value)
        elif key == PRECISION:
            _check_precision(value)
        elif key in _WHOLE:
            if type(value) is not int or not 0 <= value <= _MOST_STEPS:
                raise ValueError(f"{brief(key)} must be a whole number of at least 0, got {brief(value)}")
        elif value is not None and not _is_number(value):
            name = key if key.isidentifier() else brief(key)
            raise ValueError(f"{name} must be a number or null, got {brief(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _check_media(media: Any) -> None:
    lists = media.values() if isinstance(media, dict) else [None]
    for names in lists:
        if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
            raise ValueError(f"media must have lists of file names by tag, got {brief(media)}")


def _check_precision(losses: Any) -> None:
    try:
        read = PrecisionLosses.from_json(losses)
        layers = [*read.layers]
        is_valid = (
            {read.dtype, read.gradient_dtype} <= _FORMATS
            and isinstance(losses["layers"], Mapping)
            and _is_number(read.loss_scale)
            and 0 < read.loss_scale < math.inf
            and all(_is_histogram(found) for layer in layers for found in list(vars(layer).values())[1:])
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"precision must have histograms of the values of layers, got {brief(losses)}")


def _is_histogram(found: Any) -> bool:
    counts = found.counts
    return len(counts) == len(found.edges) and all(type(n) is int and 0 <= n <= 2**50 for n in counts)
