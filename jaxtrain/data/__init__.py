"""Where examples come from; `jaxtrain.data.loader` turns them into batches, and alone imports grain."""

from jaxtrain.data.arrays import Arrays, check_labels, digits, npz
from jaxtrain.data.images import ImageFolder, image_folder
from jaxtrain.data.source import Example, Source
from jaxtrain.data.text import Text, split_text, stdlib_files, text_files, unigram_entropy

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
