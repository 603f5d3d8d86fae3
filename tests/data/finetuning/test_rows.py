"""Rows of examples: what is in them, what is in the loss, and what was cut off."""

import io
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import TokenizedDocuments, pack
from jaxtrain.data.finetuning import (
    Conversation,
    EncodedExamples,
    ModelTokenizer,
    PlainText,
    Preference,
    duplicates,
    encode_example,
    encode_examples,
    loss_masks,
    parse_example,
    preference_rows,
    print_examples,
    read_examples,
    remarks,
    supervised_rows,
)
from jaxtrain.data.loader import Loader
from jaxtrain.errors import UserError
from tests.data.finetuning.templates import byte_level, write_folder
from tests.data.finetuning.test_examples import write

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=2, max_size=9)


@pytest.fixture(scope="module")
def made() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def texts(made: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(write_folder(tmp_path_factory.mktemp("model"), "chatml", made))


def encoded(masks: list[list[bool]], kind: Any) -> EncodedExamples:
    """Return texts whose tokens encode their text and their position in it."""
    coded = [2 * (100 * (i + 1) + np.arange(len(mask))) + mask for i, mask in enumerate(masks)]
    return EncodedExamples(TokenizedDocuments(np.concatenate(coded), np.cumsum([0, *map(len, masks)])), kind)


@settings(max_examples=40)
@given(MASKS, st.integers(1, 9), st.booleans(), st.sampled_from([Conversation, PlainText]))
def test_rows_lose_no_token_that_the_summary_does_not_count(
    masks: list[list[bool]], length: int, packing: bool, kind: Any
) -> None:
    examples = encoded(masks, kind)
    limit = 99 if kind is PlainText else length
    kept = [mask[: limit + 1] for mask in masks]
    if not any(any(mask[1:]) for mask in kept):
        with pytest.raises(UserError, match="no example has a token in the loss that fits into a row"):
            supervised_rows(examples, length, pad=0, packing=packing)
        return
    rows, summary = supervised_rows(examples, length, pad=0, packing=packing)
    names = ("tokens", "targets", "weight", "segments")
    found = [
        (int(token), int(target), bool(weight))
        for row in map(rows.__getitem__, range(len(rows)))
        for token, target, weight, segment in zip(*(row[name] for name in names), strict=True)
        if segment or weight
    ]
    numbers = [(100 * (i + 1), mask) for i, mask in enumerate(kept) if any(mask[1:])]
    expected = [(n + i, n + j, mask[j]) for n, mask in numbers for i, j in pairwise(range(len(mask)))]
    assert sorted(found) == sorted(expected)
    in_rows = sum(len(mask) for _, mask in numbers)
    assert summary.tokens == in_rows + summary.cut_tokens + summary.dropped_tokens == sum(map(len, masks))
    assert summary.loss_tokens == sum(weight for _, _, weight in found)
    assert summary.examples - summary.dropped_examples == len(numbers)
    assert (summary.cut_examples > 0) == (summary.cut_tokens > 0)
    assert summary.rows == len(rows)
    if not packing and kind is Conversation:
        assert len(rows) == len(numbers)


@settings(max_examples=30)
@given(MASKS.map(lambda masks: masks[: len(masks) // 2 * 2]), st.integers(1, 9))
def test_a_pair_is_dropped_with_either_text(masks: list[list[bool]], length: int) -> None:
    has_loss = [any(mask[1 : length + 1]) for mask in masks]
    pairs = [i for i in range(0, len(masks), 2) if has_loss[i] and has_loss[i + 1]]
    if not pairs:
        return
    rows, summary = preference_rows(encoded(masks, Preference), length, pad=-1)
    assert [len(rows), summary.rows, summary.dropped_examples] == [len(pairs), len(pairs), len(masks) // 2 - len(pairs)]
    for row, first in zip(map(rows.__getitem__, range(len(rows))), pairs, strict=True):
        assert all(values.shape == (2, length) for values in row.values())
        for side in (0, 1):
            mask = masks[first + side][: length + 1]
            count = len(mask) - 1
            start = 100 * (first + side + 1)
            assert row["targets"][side].tolist() == [*range(start + 1, start + 1 + count), *[-1] * (length - count)]
            assert row["weight"][side].tolist() == [*mask[1:], *[0] * (length - count)]
            assert row["positions"][side].tolist() == [*range(count), *[0] * (length - count)]


def test_rows_are_the_same_after_a_restart_and_those_of_pack() -> None:
    masks = [[True] * n for n in (5, 3, 9, 2, 7)]
    examples = encoded(masks, PlainText)
    rows, _ = supervised_rows(examples, 6, pad=0)
    plain = pack([examples[i].tokens for i in range(len(examples))], 6, pad=0)
    assert len(rows) == len(plain)
    for i in range(len(rows)):
        assert all((rows[i][name] == plain[i][name]).all() for name in plain[i])
    loader = Loader(rows, 2, seed=0)
    next(loader)
    position, expected = loader.state(), next(loader)
    again = Loader(pickle.loads(pickle.dumps(rows)), 2, seed=0)
    again.restore(position)
    assert all((values == expected[name]).all() for name, values in next(again).items())
    assert expected["weight"].shape == (2, 6)
    with pytest.raises(UserError, match="the examples are preferences"):
        supervised_rows(encoded(masks, Preference), 6, pad=0)
    with pytest.raises(UserError, match="of the kind PlainText: add the fields chosen and rejected"):
        preference_rows(examples, 6, pad=0)


def test_completions_are_in_the_loss_alone(texts: ModelTokenizer) -> None:
    end = texts.special("end")
    question, answer = {"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}
    expected = {
        "text": ({"text": "a b"}, ["a b<|im_end|>"]),
        "completion": ({"prompt": "6 * 7 =", "completion": " 42"}, [" 42<|im_end|>"]),
        "messages": ({"prompt": [question], "completion": [answer]}, ["42<|im_end|>\n"]),
        "preference": (
            {"prompt": "6 * 7 =", "chosen": " 42", "rejected": " 👩‍🚀"},
            [" 42<|im_end|>", " 👩‍🚀<|im_end|>"],
        ),
        "messages preferred": (
            {"chosen": [question, answer], "rejected": [question, {**answer, "content": ""}]},
            ["42<|im_end|>\n", "<|im_end|>\n"],
        ),
    }
    for name, (row, in_loss) in expected.items():
        found = encode_example(parse_example(row, "here"), texts)
        assert [texts.decode_all(one.tokens[one.mask]) for one in found] == in_loss, name
        if "text" in row or isinstance(row.get("prompt"), str):
            assert all(one.tokens[-1] == end for one in found)
        # What is in the loss is the end of each of these texts.
        assert all(one.mask.tolist() == sorted(one.mask.tolist()) for one in found)


def test_special_tokens_that_the_tokenizer_adds_are_not_repeated(tmp_path: Path) -> None:
    made = byte_level()
    start, end = made.token_to_id("<|endoftext|>"), made.token_to_id("<|im_end|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", start), ("<|im_end|>", end)]
    )
    texts = ModelTokenizer(write_folder(tmp_path, "chatml", made))
    (found,) = encode_example(parse_example({"prompt": "ab", "completion": "c"}, "here"), texts)
    assert texts.decode_all(found.tokens) == "<|endoftext|>abc<|im_end|>"
    assert found.mask.tolist() == [False, False, False, True, True]


def test_examples_are_tokenized_once_and_errors_name_their_line(
    texts: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", str(tmp_path / "cache"))
    turns = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é" * i}] for i in range(200)]
    file = write(tmp_path / "a.jsonl", [{"messages": messages} for messages in turns])
    first = encode_examples(read_examples(file), texts)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (alone,) = encode_example(read_examples(file)[117], texts)
    assert all((a == b).all() for a, b in zip(first[117], alone, strict=True))
    monkeypatch.setattr(loss_masks, "_encode", None)
    again = encode_examples(read_examples(file), texts)
    assert (again.coded.tokens == first.coded.tokens).all()
    monkeypatch.undo()
    write(file, [{"messages": turns[3]}, {"messages": [{"role": "user", "content": "Hi"}, {"role": "tool"}]}])
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: message 2 has no content"):
        encode_examples(read_examples(file), texts)


def test_rows_have_the_weights_of_their_examples_and_count_divided_ones(made: Any, tmp_path: Path) -> None:
    texts = ModelTokenizer(write_folder(tmp_path / "model", "qwen-3", made))
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    turns = [(4 * [user, answer], 2.0), ([user, answer], 0), ([user, answer], None), ([user], 1), ([user, answer], 0.5)]
    turns += [([{**user, "content": "long " * 90}, answer], 1)]
    file = write(tmp_path / "a.jsonl", [{"messages": messages[:4], "weight": weight} for messages, weight in turns])
    for _ in range(2):  # the second time from the cache
        examples = encode_examples(read_examples(file), texts)
        rows, summary = supervised_rows(examples, 100, pad=0)
        weights = [
            sorted({float(weight) for weight in row["weight"][row["segments"] == segment]})
            for row in map(rows.__getitem__, range(len(rows)))
            for segment in range(1, row["segments"].max() + 1)
        ]
        assert sorted(weights) == [[0.0, 0.5], [0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]
    assert (summary.examples, summary.divided, summary.parts) == (7, 1, 2)
    assert (summary.unanswered, summary.cut_away, summary.weightless) == (1, 1, 1)
    assert summary.lines()[1] == (
        "1 conversation is 2 of these examples, since the chat template rewrites earlier answers"
    )
    assert summary.lines()[-1].endswith(
        ": 1 without a token in the loss, 1 whose answer starts after the end of a row, 1 of weight 0"
    )


def test_preferences_whose_answers_are_several_texts_are_refused(made: Any, tmp_path: Path) -> None:
    texts = ModelTokenizer(write_folder(tmp_path / "model", "qwen-3", made))
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    rejected = [{**answer, "content": "No"}, user, answer]
    file = write(tmp_path / "a.jsonl", [{"prompt": [user], "chosen": [answer, user, answer], "rejected": rejected}])
    with pytest.raises(
        UserError, match=r"line 1: .* rewrites earlier answers, so that the 2 answers are no single text"
    ):
        encode_examples(read_examples(file), texts)


def test_empty_and_endless_answers_and_duplicates_are_counted(made: Any, tmp_path: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    folder = write_folder(tmp_path / "model", "chatml", made)
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "assistant: "}
    empty = {**answer, "content": " "}
    contents = [[user, answer], [user, answer], [user, empty], [user]]
    file = write(tmp_path / "a.jsonl", [{"messages": messages} for messages in contents])
    texts = ModelTokenizer(folder)
    examples = encode_examples(read_examples(file), texts)
    assert remarks(examples, texts) == ["1 answer is empty"]
    assert duplicates(examples, examples) == 4
    other = write(tmp_path / "b.jsonl", [{"messages": [user, answer]}, {"messages": [user, user]}])
    assert duplicates(encode_examples(read_examples(other), texts), examples) == 1
    assert duplicates(examples, encode_examples(read_examples(other), texts)) == 2
    texts = pickle.loads(pickle.dumps(ModelTokenizer(folder, template=template)))
    assert remarks(encode_examples(read_examples(file), texts), texts)[-1] == (
        "3 answers have no special token in the loss, such as eos_token: the model does not learn where they end"
    )
    template.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"endless\.jinja cannot be read .*: use a chat template"):
        ModelTokenizer(folder, template=template)


def test_a_page_of_examples_grays_what_is_not_in_the_loss(texts: ModelTokenizer, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi\x07"}, {"role": "assistant", "content": f"Hello 👩{i}"}]}
        for i in range(3)
    ]
    examples = encode_examples(read_examples(write(tmp_path / "a.jsonl", rows)), texts)
    packed, _ = supervised_rows(examples, 300, pad=texts.special("pad"))
    page = io.StringIO()
    print_examples(packed, texts, count=2, file=page)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    body = f"{system}<|im_start|>user\nHi·<|im_end|>\n<|im_start|>assistant\n«Hello 👩"
    assert page.getvalue().count(body) == 2
    assert page.getvalue().startswith("example 1, in row 1: ")
    assert "👩1<|im_end|>\n»\n" in page.getvalue()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        terminal = Terminal()
        print_examples(packed, texts, count=1, file=terminal)
        patch.setenv("NO_COLOR", "1")
        print_examples(packed, texts, count=1, file=(colorless := Terminal()))
    assert "\x1b[90m" in terminal.getvalue()
    assert "«" not in terminal.getvalue()
    assert "«" in colorless.getvalue()
    pairs = write(tmp_path / "b.jsonl", [{"prompt": "p", "chosen": "c" * 3000, "rejected": "r"}])
    both, _ = preference_rows(encode_examples(read_examples(pairs), texts), 4000, pad=0)
    page = io.StringIO()
    print_examples(both, texts, file=page)
    assert "example 1, chosen: " in page.getvalue()
    assert "; abbreviated\np«" + "c" * 400 + " […2,210 characters…] " + "c" * 390 + "<|im_end|>»" in page.getvalue()
    assert "example 1, rejected: 3 tokens, 2 in the loss\np«r<|im_end|>»" in page.getvalue()
