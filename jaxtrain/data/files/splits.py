"""The split that a file or a folder belongs to, by its name."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxtrain.errors import UserError

TRAIN_SPLITS = ("train", "training")
VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "eval", "test", "testing")
"""Names of what is held out; of several, the first is the validation set."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.")  # of the Hugging Face Hub


def split_of(path: Path) -> str | None:
    """Return the split that the words of a relative path name, None without one.

    The name of the file counts before those of the folders around it, as in the datasets of the Hugging Face Hub.

    Example:
      >>> [split_of(Path(name)) for name in ("data/test-00000-of-00001.parquet", "train/a.jsonl", "latest.txt")]
      ['test', 'train', None]
    """
    for part in reversed(path.parts):
        words = re.findall("[a-z]+", part.lower())
        for name in (*TRAIN_SPLITS, *VALIDATION_SPLITS):
            if name in words:
                return name
    return None


def files_of_splits(files: Sequence[Path], root: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files of (train, validation) if the names of some say so, None otherwise.

    Args:
      files: Files below `root`.
      root: Folder.

    Raises:
      UserError: Some are held out by their names, and no name says which are to be trained on; or several splits of the
        Hub, such as train_sft and train_gen, could be meant.
    """
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.relative_to(root)), []).append(file)
    train = next((by_split[name] for name in TRAIN_SPLITS if name in by_split), None)
    held_out = next((by_split[name] for name in VALIDATION_SPLITS if name in by_split), None)
    if train is None and held_out is not None and None in by_split:
        raise UserError(
            f"{held_out[0]} is held out by its name, but no file of {root} is named {TRAIN_SPLITS[0]}: name the others"
            f" so, or use one of them"
        )
    if train is None or held_out is None:
        return None
    for part in (train, held_out):
        if len(names := sorted({shard[1] for file in part if (shard := _SHARD.match(file.name))})) > 1:
            raise UserError(f"{root} has the splits {' and '.join(names)}: use a folder with the files of one")
    return train, held_out


def names_except(files: Iterable[Path], used: Iterable[Path], root: Path) -> list[str]:
    """Return the names of files that are not used, relative to their folder."""
    left = {*files} - {*used}
    return [file.relative_to(root).as_posix() for file in left]
