"""The manifest of a tokenized corpus: what its shards hold, so that none of them is opened to find a row."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data.shards.shard import whole_file
from jaxtrain.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.fields import type_errors

MANIFEST = "manifest.json"
VERSION = 1
BYTES = 256
_FORMAT = "jaxtrain tokens"


class ShardEntry(NamedTuple):
    """A shard of a corpus.

    Attributes:
      file: Name of the file in the folder.
      tokens: Number of its tokens.
      documents: Number of its documents.
    """

    file: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds.

    Attributes:
      tokenizer: "bytes", or "sha256:" and the digest of the tokenizer.json.
      vocabulary: Number of different tokens.
      end: Token at the end of every document; None if there is none.
      digest: Text that differs for other corpora and other settings.
      train: Shards of the documents to train on, in their order.
      validation: Shards of the documents that are held out.
    """

    tokenizer: str
    vocabulary: int
    end: int | None
    digest: str
    train: tuple[ShardEntry, ...]
    validation: tuple[ShardEntry, ...]


def is_corpus(path: Path) -> bool:
    """Return whether a path is a folder that `tokenize_corpus` wrote, as its manifest shows.

    Example:
      >>> is_corpus(Path("texts"))
      False
    """
    try:
        return _FORMAT in (path / MANIFEST).read_text()[:100]
    except (OSError, ValueError):
        return False


def tokenizer_digest(texts: Tokenizer) -> str:
    """Return what identifies a tokenizer in a manifest.

    Raises:
      UserError: It is neither of bytes nor of a tokenizer.json.

    Example:
      >>> tokenizer_digest(ByteTokenizer())
      'bytes'
    """
    if isinstance(texts, ByteTokenizer):
        return "bytes"
    if isinstance(texts, FileTokenizer):
        return f"sha256:{hashlib.sha256(texts.file.read_bytes()).hexdigest()}"
    raise UserError(f"a corpus cannot be tokenized by a {type(texts).__name__}: use bytes or a tokenizer.json")


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    with whole_file(path, "w") as stream:
        json.dump(value, stream)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder, which makes it a corpus."""
    write_json(folder / MANIFEST, {"format": _FORMAT, "version": VERSION, **asdict(manifest)})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
      UserError: There is none, it is of another version, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text())
        if values.pop("format") != _FORMAT:
            raise ValueError("another format")
        if (version := values.pop("version")) != VERSION:
            raise UserError(f"{path} is of version {version}, not {VERSION}: tokenize the corpus again")
        splits = {name: tuple(ShardEntry(*entry) for entry in values.pop(name)) for name in ("train", "validation")}
        manifest = Manifest(**{**values, **splits})
    except FileNotFoundError:
        raise UserError(f"{folder} has no {MANIFEST}: use a folder that jaxtrain data tokenize completed") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a manifest of tokens ({error}): tokenize the corpus again") from None
    if wrong := type_errors(manifest) or _wrong_entries(manifest):
        raise UserError(f"{path} is damaged ({wrong[0]}): tokenize the corpus again")
    return manifest


def _wrong_entries(manifest: Manifest) -> list[str]:
    return [
        f"entry {entry!r}"
        for entry in (*manifest.train, *manifest.validation)
        if not isinstance(entry.file, str)
        or Path(entry.file).name != entry.file
        or not (isinstance(entry.tokens, int) and isinstance(entry.documents, int) and entry.tokens >= 0)
    ]
