"""Tokenizers: bytes, and a tokenizer.json."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.data import ByteTokenizer, FileTokenizer, split_documents, split_text, text_files, tokenizer
from jaxtrain.errors import UserError

TEXT = "a tokenizer of few words for a text of few words"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator([TEXT], tokenizers.trainers.WordLevelTrainer(special_tokens=special))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@given(st.text())
def test_bytes_decode_to_the_text_they_encode(text: str) -> None:
    bytewise = ByteTokenizer()
    tokens = bytewise.encode(text)
    assert tokens.tolist() == list(text.encode())
    around = [bytewise.special("start"), *tokens, bytewise.special("end"), bytewise.special("pad")]
    assert bytewise.decode(around) == text


def test_special_tokens_are_distinct_and_no_bytes() -> None:
    special = {ByteTokenizer().special(role) for role in ("pad", "start", "end", "mask")}
    assert special == {256, 257, 258, 259}
    assert ByteTokenizer().size == 260


def test_a_tokenizer_file_encodes_and_decodes_text(file: Path) -> None:
    words = tokenizer(file)
    assert isinstance(words, FileTokenizer)
    tokens = words.encode("few words")
    assert len(tokens) == 2  # without the special tokens of the template
    assert words.decode([words.special("start"), *tokens, words.special("end")]) == "few words"
    assert [words.special(role) for role in ("pad", "start", "end", "mask")] == [1, 2, 3, 4]
    assert words.size == 5 + len(set(TEXT.split()))
    assert pickle.loads(pickle.dumps(words)).encode(TEXT).tolist() == words.encode(TEXT).tolist()
    assert isinstance(tokenizer(None), ByteTokenizer)


def test_unusable_tokenizers_are_reported(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json is not a file"):
        FileTokenizer(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"broken\.json is not a readable tokenizer\.json"):
        FileTokenizer(tmp_path / "broken.json")
    (tmp_path / "bare.json").write_text(file.read_text().replace("[MASK]", "[HIDE]"))
    with pytest.raises(UserError, match=r"bare\.json has no mask token: add one of \[MASK\], <mask>"):
        FileTokenizer(tmp_path / "bare.json").special("mask")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs tokenizers: pip install 'jaxtrain\[data\]'"):
        FileTokenizer(file)


def test_split_documents_concatenate_to_the_split_text(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i + 65]) * (i + 1) + b"\xe9")
    for path in (tmp_path, tmp_path / "3.txt"):
        parts = split_documents(path, ByteTokenizer())
        for documents, text in zip(parts, split_text(text_files(path), path), strict=True):
            assert np.concatenate(documents).tolist() == text.tolist()
    assert [len(part) for part in split_documents(tmp_path, ByteTokenizer())] == [11, 1]
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(UserError, match="too short to split"):
        split_documents(tmp_path / "short", ByteTokenizer())
