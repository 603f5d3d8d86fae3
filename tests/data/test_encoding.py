"""Rows of tokens with special tokens and padding."""

import pytest

from jaxtrain.data import ByteTokenizer, encode_pair, encode_row, encode_text
from jaxtrain.errors import UserError

BYTES = ByteTokenizer()
START, END, PAD = (BYTES.special(role) for role in ("start", "end", "pad"))


def test_a_text_is_cut_to_its_length_between_start_and_end() -> None:
    assert encode_text(BYTES, "abcdef", 5).tolist() == [START, 97, 98, 99, END]
    example = encode_row(BYTES, {"text": "abcdef", "label": "b"}, length=5, classes=["a", "b"])
    assert (example["tokens"].tolist(), example["label"]) == ([START, 97, 98, 99, END], 1)
    assert encode_row(BYTES, {"text": "a"}, length=4)["tokens"].tolist() == [START, 97, END, PAD]
    with pytest.raises(UserError, match="label 'c' occurs only in the validation split"):
        encode_row(BYTES, {"text": "a", "label": "c"}, length=5, classes=["a", "b"])


def test_pairs_are_ended_then_padded_and_not_cut() -> None:
    pair = encode_pair(BYTES, {"source": "abc", "target": "xyz"}, source_len=5, target_len=4)
    assert pair["source"].tolist() == [97, 98, 99, END, PAD]
    assert pair["target"].tolist() == [120, 121, 122, END]
    with pytest.raises(UserError, match="the target 'wxyz' has 5 tokens with its end token, more than target_len 4"):
        encode_pair(BYTES, {"source": "a", "target": "wxyz"}, source_len=5, target_len=4)
