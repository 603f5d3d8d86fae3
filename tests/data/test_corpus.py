"""Tokenized corpora: the tokens of the text, whatever the shards, written whole or not at all."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file, save_file

from jaxtrain.cli import main
from jaxtrain.data import ByteTokenizer, FileTokenizer, Mixture, TokenWindows, corpus, language_rows, split_documents
from jaxtrain.data.corpus import CorpusRows, TokenCorpus, named_corpora, tokenize_corpus
from jaxtrain.data.corpus.corpus_documents import TextDocuments
from jaxtrain.errors import UserError
from jaxtrain.recipes import named_recipe
from tests.data.shards import write_corpus

SPLITS = ("train", "validation")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(25):
        (folder / f"{i:02}.txt").write_text("".join(rng.choice([*"abcdefg "], size=rng.integers(1, 60))))
    return folder


@pytest.fixture
def tokenizer_file(tmp_path):
    """A tokenizer of single characters, with an end token."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {**{c: i for i, c in enumerate("abcdefg ?")}, **{f"unused{i}": i for i in range(9, 299)}, "</s>": 299}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def all_tokens(folder, split):
    opened = TokenCorpus(folder, split)
    return opened.read(0, opened.tokens).tolist()


def all_documents(folder):
    opened = TokenCorpus(folder)
    return opened.read_documents(0, opened.tokens)


@pytest.mark.parametrize("shard_tokens", [1, 50, 10**6])
def test_a_corpus_has_the_tokens_of_the_text_whatever_the_shards(texts, tmp_path, shard_tokens):
    manifest = tokenize_corpus([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=shard_tokens)
    for split, documents in zip(SPLITS, split_documents(texts, ByteTokenizer()), strict=True):
        opened = TokenCorpus(tmp_path / "out", split, ByteTokenizer())
        assert (opened.tokens, opened.documents) == (len(documents.tokens), len(documents))
        rng = np.random.default_rng(0)
        ranges = np.sort(rng.integers(opened.tokens, size=(20, 2)))
        for start, stop in [(0, opened.tokens), *ranges[ranges[:, 0] < ranges[:, 1]].tolist()]:
            tokens, is_first = opened.read_documents(start, stop)
            assert tokens.dtype == np.int32
            assert tokens.tolist() == opened.read(start, stop).tolist() == documents.tokens[start:stop].tolist()
            begins = documents.offsets[(documents.offsets >= start) & (documents.offsets < stop)]
            assert (start + np.flatnonzero(is_first)).tolist() == begins.tolist()
        rows, windows = CorpusRows(opened, 8), TokenWindows(documents.tokens, 8)
        assert [row["tokens"].tolist() for row in rows] == [row["tokens"].tolist() for row in windows]
    assert (len(manifest.train) > 20) == (shard_tokens == 1)
    assert not [*(tmp_path / "out").glob("*.partial")]
    assert not (tmp_path / "out/.progress").exists()
    loaded = load_file(tmp_path / "out" / manifest.train[0].file)  # by the library of the format
    assert loaded["tokens"].tolist() == all_tokens(tmp_path / "out", "train")[: manifest.train[0].tokens]
    assert loaded["tokens"].dtype == np.uint8
    assert loaded["offsets"][-1] == manifest.train[0].tokens


def test_packed_rows_have_every_prediction_inside_a_document_once(tmp_path):
    opened = TokenCorpus(write_corpus(tmp_path / "a", 12))
    tokens, is_first = opened.read_documents(0, opened.tokens)
    rows = CorpusRows(opened, 10, packing=True)
    for i in range(len(rows)):
        row, start = rows[i], 10 * i
        assert {array.dtype.name for array in row.values()} == {"int32"}
        for t in range(10):
            begins = [b for b in range(start, start + t + 1) if is_first[b] or b == start]
            assert row["tokens"][t] == tokens[start + t]
            assert row["targets"][t] == tokens[start + t + 1]
            assert row["positions"][t] == start + t - begins[-1]
            assert row["segments"][t] == (0 if is_first[start + t + 1] else len(begins))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_tables_and_json_lines_are_tokenized_with_an_end_token(tmp_path, tokenizer_file, kind):
    rows = [{"text": "abcdefg"[i % 7] * (i % 4)} for i in range(20)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = FileTokenizer(tokenizer_file)
    manifest = tokenize_corpus([tmp_path / f"rows.{kind}"], texts, tmp_path / "out", shard_tokens=3)
    assert (manifest.end, manifest.vocabulary, len(manifest.train) > 3) == (299, 300, True)
    tokens = all_tokens(tmp_path / "out", "train") + all_tokens(tmp_path / "out", "validation")
    ends = [-1, *(i for i, token in enumerate(tokens) if token == 299)]
    found = [texts.decode(tokens[a + 1 : b]).replace(" ", "") for a, b in pairwise(ends)]
    assert sorted(found) == sorted(row["text"] for row in rows if row["text"])  # empty texts are no documents
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    with pytest.raises(UserError, match=r"tokens of another tokenizer, .*tokenizer.json: use --tokenizer .*out/token"):
        TokenCorpus(tmp_path / "out", texts=ByteTokenizer())


def test_an_interrupted_tokenization_continues_to_the_same_bytes(texts, tmp_path, monkeypatch):
    def files(folder):
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    tokenize_corpus([texts], ByteTokenizer(), tmp_path / "whole", shard_tokens=10)
    encode, encoded = TextDocuments.encode, []

    def interrupted(self, index, tokenizer):
        if len(encoded) == 12:
            raise KeyboardInterrupt
        encoded.append(self.ranges[index])
        return encode(self, index, tokenizer)

    monkeypatch.setattr(TextDocuments, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize_corpus([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=10)
    with pytest.raises(UserError, match=r"has no manifest.json: use a folder that jaxtrain data tokenize completed"):
        TokenCorpus(tmp_path / "out")
    (tmp_path / "out/train-00099-000.safetensors.partial").write_bytes(b"cut")
    with pytest.raises(UserError, match="a part of the tokens of other corpora or settings: remove it"):
        tokenize_corpus([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=11)
    monkeypatch.setattr(TextDocuments, "encode", lambda *args: encoded.append(args) or encode(*args))
    messages = []
    tokenize_corpus([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=10, message=messages.append)
    assert "pieces are done already" in messages[0]
    assert int(messages[0].split()[0]) > 2
    assert 25 <= len(encoded) < 12 + 25  # only documents of the unfinished piece are read again
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    count = len(encoded)
    tokenize_corpus([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=10)
    assert len(encoded) == count
    with pytest.raises(UserError, match="tokens of other corpora or settings: use another folder"):
        tokenize_corpus([texts], ByteTokenizer(), tmp_path / "out", shard_tokens=11)
    with pytest.raises(UserError, match="is not empty: use another folder"):
        tokenize_corpus([texts], ByteTokenizer(), texts)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "3.safetensors").unlink(), r"3.safetensors is missing: copy it again"),
        (lambda f: os.truncate(f / "3.safetensors", 300), r"3.safetensors has 300 bytes, [\d,]+ by its header"),
        (lambda f: os.truncate(f / "3.safetensors", 150), r"3.safetensors is cut off, or not a shard of tokens"),
        (lambda f: os.truncate(f / "3.safetensors", 0), r"3.safetensors cannot be read"),
        (lambda f: (f / "3.safetensors").write_bytes(b"x" * 999), r"3.safetensors is cut off, or not a shard"),
        (
            lambda f: save_file({"tokens": -np.ones(9, int), "offsets": np.arange(2)}, f / "3.safetensors"),
            "not a shard",
        ),
        (lambda f: (f / "3.safetensors").write_bytes((f / "4.safetensors").read_bytes()), r"by the manifest"),
        (lambda f: write_corpus_with(f, vocabulary=5), r"safetensors is damaged, it has a token \d+"),
        (lambda f: write_corpus_with(f, version=2), r"manifest.json is of version 2, not 1"),
        (lambda f: write_corpus_with(f, train=[["../a", 3, 1]]), r"manifest.json is damaged \(entry"),
        (lambda f: write_corpus_with(f, train=3), r"is not a manifest of tokens"),
        (lambda f: write_corpus_with(f, end="x"), r"damaged \(end must be an int or None, got 'x'\)"),
    ],
)
def test_a_damaged_corpus_is_one_clear_line(tmp_path, damage, message):
    folder = write_corpus(tmp_path / "a", 6)
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        all_documents(folder)
    assert "\n" not in str(error.value)


def test_shards_whose_offsets_come_first_are_read(tmp_path):
    """They do in folders of earlier versions."""
    folder = write_corpus(tmp_path / "a", 6)
    expected = all_documents(folder)
    for file in folder.glob("*.safetensors"):
        arrays = load_file(file)
        save_file({name: arrays[name] for name in ("offsets", "tokens")}, file)
        assert file.read_bytes().index(b'"offsets"') < file.read_bytes().index(b'"tokens"')
    assert all((one == other).all() for one, other in zip(all_documents(folder), expected, strict=True))


def write_corpus_with(folder, **fields):
    """Replace fields of the manifest of a corpus."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_few_of_ten_thousand_shards_are_open(tmp_path, monkeypatch):
    folder = write_corpus(tmp_path / "a", 3)
    manifest = json.loads((folder / "manifest.json").read_text())
    _, tokens, documents = manifest["train"][0]
    for i in range(3, 10_000):
        os.link(folder / "1.safetensors", folder / f"{i}.safetensors")
    write_corpus_with(folder, train=[[f"{i}.safetensors", tokens, documents] for i in (1, *range(3, 10_000))])
    opened, right = [], Path.open

    def counted(path, *args, **options):
        opened.append(path.suffix)
        return right(path, *args, **options)

    monkeypatch.setattr(Path, "open", counted)
    rows = CorpusRows(TokenCorpus(folder), tokens)
    first = rows[0]["tokens"]
    assert opened.count(".safetensors") <= 2
    before = len(os.listdir("/proc/self/fd"))
    for i in range(0, len(rows), 99):
        assert (rows[i]["tokens"][:-1] == first[:-1]).all()
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    assert (pickle.loads(pickle.dumps(rows))[7]["tokens"] == rows[7]["tokens"]).all()


def test_the_system_reads_nothing_around_a_row_from_the_disk(tmp_path):
    rows = CorpusRows(TokenCorpus(write_corpus(tmp_path / "a", 2)), 8)
    rows[0]
    _, found, mapping = Path("/proc/self/smaps").read_text().partition(str(tmp_path / "a"))
    assert found
    assert "rr" in mapping.split("VmFlags:")[1].partition("\n")[0].split()  # MADV_RANDOM


def test_recipes_read_corpora_mixed_by_weights(tmp_path, tokenizer_file):
    folders = [write_corpus(tmp_path / name, 30, seed, vocabulary=256) for seed, name in enumerate("ab")]
    mixed = f"{folders[0]}=0.7,{folders[1]}=0.3"

    def read(data, texts):
        return language_rows(Path(data), texts, 8, packing=False, column="text", validation_rows=4)

    for data, counts in ((folders[0], (1,)), (mixed, (7, 3))):
        train, validation, entropy = read(data, ByteTokenizer())
        assert isinstance(train, Mixture)
        assert train.counts == validation.counts == counts
        assert 0 < entropy < np.log(256)
        for mixture, split in ((train, "train"), (validation, "validation")):
            for folder, rows in zip(folders, mixture.sources, strict=False):
                pairs = zip(rows, CorpusRows(TokenCorpus(folder, split), 8), strict=True)
                assert all((row["tokens"] == expected["tokens"]).all() for row, expected in pairs)
    assert named_corpora(tmp_path) == {} == named_corpora(None)
    for data, message in (
        (f"{folders[0]}=0.7,b", "gives 'b' no weight: write it as web=0.7,code=0.3"),
        (f"{folders[0]}=1,{folders[0]}=2", "twice"),
        (f"{tmp_path}=1", "is no folder of tokens: write one with jaxtrain data tokenize"),
        (f"{folders[0]}=0", "weight 0 of a mixture is not a positive number"),
    ):
        with pytest.raises(UserError, match=message):
            read(data, ByteTokenizer())
    with pytest.raises(UserError, match="tokens of another tokenizer, bytes: leave out --tokenizer"):
        read(folders[0], FileTokenizer(tokenizer_file))
    with pytest.raises(UserError, match="which gpt-stdlib and llama-stdlib read"):
        type(named_recipe("bert-stdlib"))(data=folders[0]).rows(ByteTokenizer())


def test_the_command_tokenizes_and_names_the_next_one(texts, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "tokenize", str(texts), "--out", str(out), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "train        " in printed
    assert f"wrote {out}: jaxtrain train gpt-stdlib --data {out}\n" in printed
    for args, message in (
        (["tokenize"], "a corpus is required"),
        (["tokenise"], "no data 'tokenise', did you mean 'tokenize'"),
        (["tokenize", "nowhere"], "nowhere does not exist"),
        (["tokenize", str(out), "--out", str(tmp_path / "x")], "is tokenized already"),
        (["tokenize", str(texts), "--validation", "1", "--out", str(tmp_path / "x")], "must be in (0, 1), got 1"),
    ):
        assert main(["data", *args]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.nightly
def test_a_killed_tokenization_by_several_processes_continues(texts, tmp_path):
    command = [sys.executable, "-m", "jaxtrain.cli", "data", "tokenize", str(texts), "--shard-tokens", "1"]
    command += ["--workers", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob("out/.progress/*.json")] and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command, check=True)
    corpus.tokenize_corpus([texts], ByteTokenizer(), tmp_path / "whole", shard_tokens=1)
    for split in SPLITS:
        assert all_tokens(tmp_path / "out", split) == all_tokens(tmp_path / "whole", split)
    deadline = time.monotonic() + 20
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left  # the workers end with their parent


def processes_of(folder):
    """Return the processes whose command line names a folder."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line for line in lines if str(folder).encode() in line and b"jaxtrain.cli" in line]
