"""Where examples come from; `jaxtrain.data.loader` turns them into batches, and alone imports grain."""

from jaxtrain.data.sources import (
    Arrays,
    Example,
    ImageFolder,
    Source,
    Text,
    check_labels,
    digits,
    image_folder,
    npz,
    split_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)

__all__ = [
    "Arrays",
    "Example",
    "ImageFolder",
    "Source",
    "Text",
    "check_labels",
    "digits",
    "image_folder",
    "npz",
    "split_text",
    "stdlib_files",
    "text_files",
    "unigram_entropy",
]
