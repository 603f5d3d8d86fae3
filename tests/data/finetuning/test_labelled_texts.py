"""Labelled texts and whole preferences as rows, beside the tokenizer of `transformers`."""

import io
import json

import numpy as np
import pytest
import transformers

from jaxtrain.data import TokenizedDocuments
from jaxtrain.data.finetuning import (
    EncodedExamples,
    ModelTokenizer,
    Preference,
    encode_examples,
    encode_labelled,
    label_names,
    label_numbers,
    labelled_rows,
    parse_labelled,
    print_examples,
    read_examples,
    reward_rows,
)
from jaxtrain.errors import UserError
from tests.data.finetuning.templates import byte_level, write_folder


@pytest.fixture(autouse=True)
def without_cache(monkeypatch):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    write_folder(folder, "chatml", byte_level(), pad_token="<pad>")
    return folder


def labelled(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(path, parse_labelled)


def refused(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_labelled_texts_have_the_tokens_of_transformers_and_lose_their_end(folder, tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    examples = labelled(
        tmp_path / "a.jsonl",
        [
            {"text": "a long text", "label": "good"}, {"text": "", "label": "bad"},
            {"messages": chat, "label": "bad"}, {"prompt": "a", "completion": "b", "label": "good"},
        ],
    )  # fmt: skip
    theirs, texts = transformers.AutoTokenizer.from_pretrained(folder), ModelTokenizer(folder)
    expected = [theirs("a long text").input_ids, [], theirs.apply_chat_template(chat, return_dict=False)]
    expected.append(theirs("ab").input_ids)
    encoded, names = encode_labelled(examples, texts), label_names(examples)
    assert [encoded[i].tolist() for i in range(4)] == expected
    assert names == ("bad", "good")
    length, pad = len(expected[0]) - 2, texts.special("pad")
    rows, summary = labelled_rows(encoded, label_numbers(examples, names), names, length, pad)
    assert rows[0]["tokens"].tolist() == expected[0][:-2]
    assert rows[2]["tokens"].tolist() == expected[3] + [pad] * (length - len(expected[3]))
    assert [int(rows[i]["label"]) for i in range(len(rows))] == [1, 0, 1]
    cut = 2 + len(expected[2]) - length
    assert summary.lines()[1:] == [
        f"2 examples (50.0%) are longer than a row: {cut} tokens ({cut / summary.tokens:.1%}) are cut off at their end",
        "1 example (25.0%) is dropped, with 0 tokens (0.0%): 1 without a token",
        "labels: bad 1, good 2",
    ]
    page = io.StringIO()
    print_examples(rows, texts, file=page, labels=names)
    assert f"example 1, label good: {length} tokens; " not in page.getvalue()
    assert f"example 1, label good: {length} tokens\na long te\n" in page.getvalue()


def test_labels_are_names_or_numbers_of_names(tmp_path):
    numbers = labelled(tmp_path / "numbers.jsonl", [{"text": "a", "label": x} for x in (10, 9, 10)])
    assert label_names(numbers) == ("9", "10")
    assert label_numbers(numbers, ("9", "10")).tolist() == [1, 0, 1]
    assert label_numbers(labelled(tmp_path / "n.jsonl", [{"text": "a", "label": 1}]), ("bad", "good")).tolist() == [1]
    one = labelled(tmp_path / "one.jsonl", [{"text": "a", "label": "x"}])
    assert "must have two or more labels, got x" in refused(lambda: label_names(one))
    assert "line 1: label 'x' is unknown: use one of a, b" in refused(lambda: label_numbers(one, ("a", "b")))
    mixed = labelled(tmp_path / "mixed.jsonl", [{"text": "a", "label": x} for x in ("x", 1)])
    assert "are numbers and texts" in refused(lambda: label_names(mixed))
    for label, what in ((None, "has no label"), (0.5, "has the label 0.5")):
        assert what in refused(lambda row={"text": "a", "label": label}: parse_labelled(row, "line 1"))


def test_preferences_with_a_text_longer_than_a_row_are_dropped(folder, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a ", "chosen": "b", "rejected": "c" * (1 + 40 * i)} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ModelTokenizer(folder)
    encoded = encode_examples(read_examples(path), texts)
    found, summary = reward_rows(encoded, 20, texts.special("pad"))
    assert (len(found), summary.dropped_examples, summary.length) == (1, 1, len(encoded[0].tokens))
    np.testing.assert_array_equal(found[0]["tokens"], [encoded[0].tokens, encoded[1].tokens])
    assert found.text(0, 1)[-1] == texts.special("end")
    assert "more than 2 tokens" in refused(lambda: reward_rows(encoded, 2, 0))
    one_empty = TokenizedDocuments(np.array([6, 8, 10, 12]), np.array([0, 2, 3, 4, 4]))
    found, summary = reward_rows(EncodedExamples(one_empty, Preference), 20, 0)
    assert (found[0]["tokens"].tolist(), len(found), summary.dropped_tokens) == ([[3, 4], [5, 0]], 1, 1)
