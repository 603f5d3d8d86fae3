"""Corpora of random tokens, written without a tokenizer."""

from pathlib import Path

import numpy as np

from jaxtrain.data.corpus import Manifest, ShardEntry
from jaxtrain.data.corpus.corpus_manifest import write_manifest
from jaxtrain.data.shards.shard import whole_file, write_shard


def write_corpus(folder: Path, shards: int, seed: int = 0, vocabulary: int = 1000) -> Path:
    """Write a corpus of shards of random lengths and documents, the first of them held out; return its folder."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    entries = []
    for i in range(shards):
        lengths = rng.integers(1, 40, size=rng.integers(1, 12))
        tokens = rng.integers(vocabulary, size=lengths.sum()).astype(np.uint16)
        with whole_file(folder / f"{i}.safetensors") as stream:
            write_shard(stream, np.split(tokens, lengths.cumsum()[:-1]), np.uint16)
        entries.append(ShardEntry(f"{i}.safetensors", len(tokens), len(lengths)))
    write_manifest(folder, Manifest("bytes", vocabulary, None, "", tuple(entries[1:]), tuple(entries[:1])))
    return folder
