"""Tokens are computed once for all processes and commands, and the cache never returns stale ones."""

import json
import mmap
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import ByteTokenizer, pack, split_documents, split_text, text_files, tokenized_rows
from jaxtrain.data.shards import token_cache
from jaxtrain.data.shards.token_cache import tokenized
from jaxtrain.data.text.tokenizer import FileTokenizer
from jaxtrain.errors import UserError
from jaxtrain.user_cache import prune, user_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i:02}.txt").write_text(f"text {i} " * (i + 1))
    return tmp_path / "corpus"


@pytest.fixture
def encoded(monkeypatch):
    """The texts that the byte tokenizer has encoded."""
    texts = []
    for name in ("encode", "encode_file"):
        encode = getattr(ByteTokenizer, name)
        monkeypatch.setattr(ByteTokenizer, name, lambda self, x, f=encode: texts.append(x) or f(self, x))
    return texts


def root_of(array):
    """Return the object that owns the memory of an array."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def documents_of(*lists):
    return lambda: (np.array(tokens) for tokens in lists)


def test_files_are_tokenized_once(cache, corpus, encoded):
    first = split_documents(corpus, ByteTokenizer())
    assert len(encoded) == 20
    second = split_documents(corpus, ByteTokenizer())
    assert len(encoded) == 20
    for one, other, text in zip(first, second, split_text(text_files(corpus), corpus), strict=True):
        assert [x.tolist() for x in one] == [x.tolist() for x in other]
        assert other.tokens.tolist() == text.tolist()
        assert isinstance(root_of(other.tokens), mmap.mmap)
    assert len(list(cache.iterdir())) == 2


def test_rows_of_a_table_are_tokenized_once_when_they_are_packed(cache, corpus, encoded):
    rows = [{"text": "row " * i} for i in range(2, 12)]
    for _ in range(2):
        packed = pack(tokenized_rows(corpus, rows, "text", ByteTokenizer(), "train"), 8, pad=0)
        for i in range(len(packed)):
            packed[i]
    assert len(encoded) == 10


def test_a_different_content_tokenizer_or_split_is_tokenized_again(cache, corpus, encoded, tmp_path):
    def read():
        return split_documents(corpus, ByteTokenizer())[0].tokens.tolist()

    before = read()
    file = corpus / "05.txt"
    stat = file.stat()
    file.write_text(file.read_text().replace("5", "6"))  # the same size and, below, the same time
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert read() != before
    parts = [tokenized_rows(corpus, [{"text": t}], "text", ByteTokenizer(), t).tokens.tolist() for t in ("ab", "cd")]
    assert parts == [list(b"ab"), list(b"cd")]
    tokenizers = pytest.importorskip("tokenizers")
    found = []
    for vocabulary in ({"ab": 0, "?": 1}, {"?": 0, "ab": 300}):
        model = tokenizers.models.WordLevel({**{str(i): i for i in range(2, 300)}, **vocabulary}, unk_token="?")
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        if 1 not in vocabulary.values():  # without gaps in the token ids
            content = json.loads((tmp_path / "tokenizer.json").read_text())
            content["model"]["vocab"]["!"] = 1
            (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        documents = tokenized_rows(
            corpus, [{"text": "ab"}], "text", FileTokenizer(tmp_path / "tokenizer.json"), "train"
        )
        found.append((documents.tokens.dtype, documents.tokens.tolist()))
    assert found == [(np.uint16, [0]), (np.uint16, [300])]


def test_empty_corpora_and_empty_documents_are_cached(cache):
    for lists in ([], [[]], [[1], [], [2, 3]]):
        for _ in range(2):
            documents = tokenized(["key", str(lists)], documents_of(*lists), np.uint16)
            assert [x.tolist() for x in documents] == lists
            assert documents.tokens.dtype == np.uint16


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_a_damaged_file_is_replaced(cache, damage):
    tokenized(["key"], documents_of([1, 2, 3], [4]), np.uint8)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-8], "empty": b"", "foreign": b"x" * len(content)}[damage])
    assert [x.tolist() for x in tokenized(["key"], documents_of([1, 2, 3], [4]), np.uint8)] == [[1, 2, 3], [4]]
    assert file.read_bytes() == content


def test_a_failure_leaves_no_file(cache):
    def failing():
        yield np.array([1])
        raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        tokenized(["key"], failing, np.uint8)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("setting", ["off", "/dev/null/nowhere"])
def test_tokens_are_kept_in_memory_without_a_cache_folder(monkeypatch, setting):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", setting)
    assert [x.tolist() for x in tokenized(["key"], documents_of([1, 2], [3]), np.uint8)] == [[1, 2], [3]]


def test_the_default_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXTRAIN_TOKEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenized(["key"], documents_of([1]), np.uint8)
    assert [p.suffix for p in (tmp_path / "jaxtrain" / "tokens").iterdir()] == [".safetensors"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache("tokens") == Path.home() / ".cache" / "jaxtrain" / "tokens"


def test_tokens_are_kept_in_memory_without_a_home_directory(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("JAXTRAIN_TOKEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert tokenized(["key"], documents_of([1, 2]), np.uint8).tokens.tolist() == [1, 2]
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        user_cache("xla")


def test_the_least_recently_used_files_are_removed(cache, monkeypatch):
    for i in range(3):
        tokenized([str(i)], documents_of([i] * 4000), np.uint8)
        for file in cache.iterdir():  # a day passes
            os.utime(file, (file.stat().st_mtime - 86400,) * 2)
    tokenized(["0"], documents_of([9]), np.uint8)
    monkeypatch.setattr(token_cache, "MAX_BYTES", 13_000)
    tokenized(["3"], documents_of([3] * 4000), np.uint8)
    assert sorted(file.stat().st_size for file in cache.iterdir()) == [5040, 5040]
    assert [tokenized([str(i)], documents_of([9]), np.uint8).tokens[0] for i in range(4)] == [0, 9, 9, 3]


def test_pruning_keeps_the_protected_file_and_ignores_a_missing_folder(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.tokens").write_bytes(bytes(100))
    prune(tmp_path, "*.tokens", 100, protected=tmp_path / "0.tokens")
    assert [p.name for p in tmp_path.iterdir()] == ["0.tokens"]
    prune(tmp_path / "missing", "*", 0)


def _tokenize(folder, log, barrier):
    os.environ["JAXTRAIN_TOKEN_CACHE"] = folder

    def documents():
        with Path(log).open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        for i in range(300):
            yield np.full(100, i % 256)

    barrier.wait()
    assert tokenized(["key"], documents, np.uint8).tokens.sum() == sum(100 * (i % 256) for i in range(300))


# The forked processes do not use JAX, which warns if it was used before.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_only_one_of_several_processes_tokenizes(cache, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (str(cache), str(tmp_path / "log"), barrier)
    processes = [context.Process(target=_tokenize, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert [p.suffix for p in cache.iterdir()] == [".safetensors"]
