"""Examples to fine-tune on: their kinds, their files, and what is wrong with them in one line."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.data.finetuning import (
    Completion,
    Conversation,
    PlainText,
    Preference,
    parse_example,
    read_examples,
    split_examples,
)
from jaxtrain.errors import UserError

USER, ANSWER = ({"role": role, "content": role} for role in ("user", "assistant"))
OTHER = {"role": "assistant", "content": "other"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": None}}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_kinds_are_recognized_by_their_fields() -> None:
    assert parse_example({"text": "a", "id": 3, "messages": None}, "w") == PlainText("a", "w")
    for prompt, completion in (("prompt", "completion"), ("prompt", "response"), ("question", "answer")):
        assert parse_example({prompt: "a", completion: "b", "text": "c"}, "w") == Completion("a", "b", None, "w")
    assert parse_example({"prompt": [USER], "completion": [ANSWER]}, "w") == Completion((USER,), (ANSWER,), None, "w")
    conversation = Conversation((USER, ANSWER), [TOOL], "w")
    assert parse_example({"messages": [USER, ANSWER], "prompt": "a", "tools": json.dumps([TOOL])}, "w") == conversation
    shared = [
        {"from": "system", "value": "s", "role": None},
        {"from": "human", "value": "u", "weight": 1},
        {"from": "gpt", "value": "a"},
        {"from": "observation", "value": "o"},
    ]
    found = parse_example({"conversations": shared, "tools": ""}, "w")
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("system", "s"),
        ("user", "u"),
        ("assistant", "a"),
        ("tool", "o"),
    ]
    assert found.tools is None
    for row in ({"text": "a"}, {"prompt": "a", "answer": "b"}, {"messages": [USER]}):
        assert parse_example({**row, "weight": 2}, "w").weight == 2.0
    called = parse_example({"messages": [USER, CALL]}, "w").messages[1]
    assert called == {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": None}}]}


def test_preferences_contain_their_prompt_or_have_it_beside_them() -> None:
    expected = Preference((USER,), (ANSWER,), (OTHER,), None, "w")
    for row in (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": "user", "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": "user", "chosen": [USER, ANSWER], "rejected": [USER, OTHER], "messages": [USER, ANSWER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ):
        assert parse_example(row, "w") == expected
    texts = {"prompt": "p", "chosen": "c", "rejected": "r"}
    assert parse_example({**texts, "weight": 0.5}, "w") == Preference("p", "c", "r", None, "w", 0.5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "^w has only the fields prompt: name them text; prompt and completion; messages; or"),
        ({}, "^w has only the fields of no value"),
        ({"text": 3}, "^w: text is of type int, not text: write it as a string"),
        ({"text": "\ud800"}, r"^w: text has an incomplete \\u escape"),
        ({"prompt": "a", "answer": [ANSWER]}, "^w: of prompt and answer one is text and the other messages"),
        ({"messages": []}, r"^w: messages is empty: write messages as \[\{"),
        ({"messages": ["a"]}, "^w: message 1 is of type str: write messages as"),
        ({"messages": [USER, {"content": "a"}]}, "^w: message 2 has no role: write messages as"),
        ({"messages": [{"role": "user"}]}, "^w: message 1 has no content that is text"),
        ({"messages": [{"role": "user", "content": 3}]}, "^w: message 1 has no content that is text"),
        ({"messages": [{**USER, "at": b"a"}]}, "^w: message 1: at is of type bytes: use text, numbers"),
        ({"messages": [USER], "tools": "[{"}, "^w: tools is not valid JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, "^w: tools is not a list of objects"),
        ({"text": "a", "weight": "5 kg"}, "^w: weight is '5 kg', not a number of at least 0: correct it, or rename"),
        ({"text": "a", "weight": -1}, "^w: weight is -1, not a number of at least 0"),
        ({"text": "a", "weight": float("nan")}, "^w: weight is nan, not a number of at least 0"),
        ({"text": "a", "weight": True}, "^w: weight is True, not a number of at least 0"),
        ({"chosen": "a", "rejected": "b"}, "^w has no prompt beside chosen and rejected"),
        ({"chosen": "a", "rejected": [USER]}, "^w: of chosen and rejected one is text"),
        (
            {"prompt": 3, "completion": "a"},
            "^w: prompt is of type int, neither text nor messages: write it as a string",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "^w: chosen and rejected do not differ in their answer"),
        ({"chosen": [USER], "rejected": [USER]}, "^w: chosen and rejected do not differ in their answer"),
        ({"chosen": [USER], "rejected": [ANSWER]}, "^w: prompt is missing: write messages as"),
    ],
)
def test_malformed_rows_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        parse_example(row, "w")
    assert "\n" not in str(raised.value)


ROWS: list[dict[str, Any]] = [
    {"messages": [USER, {**ANSWER, "content": str(i), "n": i}], "tools": [TOOL] if i else None} for i in range(20)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines))
    return path


def test_every_format_holds_the_same_examples(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet, feather = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.feather")
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    feather.write_feather(table, tmp_path / "a.feather", compression="uncompressed")
    pytest.importorskip("datasets").Dataset(table).save_to_disk(tmp_path / "saved")
    paths = [tmp_path / "a.parquet", tmp_path / "a.feather", tmp_path / "saved"]
    paths += [write(tmp_path / name, ROWS) for name in ("a.jsonl", "a.ndjson", "a.json", "folder/a.jsonl")]
    paths[-1] = paths[-1].parent
    expected = [parse_example(row, "") for row in ROWS]
    held_out = set()
    for path in paths:
        examples = read_examples(path)
        assert examples.kind is Conversation
        found = [examples[i] for i in range(len(examples))]
        assert [(one.messages, one.tools) for one in found] == [(one.messages, one.tools) for one in expected], path
        parts = split_examples(path)
        assert [len(part) for part in parts] == [18, 2]
        held_out.add(tuple(int(example.messages[1]["content"]) for example in parts[1]))
        assert pickle.loads(pickle.dumps(parts[0]))[3] == parts[0][3]
        assert parts[0].identity() != parts[1].identity()
        assert "19" in examples[19].where or "20" in examples[19].where
    assert len(held_out) == 1


def test_files_and_splits_have_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:3])
    write(tmp_path / "test.jsonl", ROWS[3:5])
    train, validation = split_examples(tmp_path)
    assert [len(train), len(validation)] == [3, 2]
    assert validation[0].where == f"{tmp_path / 'test.jsonl'}, line 1"


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist: use a file of examples"):
        read_examples(tmp_path / "nowhere")
    (tmp_path / "a.pkl").write_bytes(b"")
    for path in (tmp_path, tmp_path / "a.pkl"):
        with pytest.raises(UserError, match=r"has no examples: use \.jsonl, \.ndjson, \.json, \.parquet, \.arrow"):
            read_examples(path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl has no examples: write at least one"):
        read_examples(tmp_path / "empty.jsonl")
    mixed = read_examples(write(tmp_path / "mixed.jsonl", [{"text": "a"}, {"prompt": "a", "response": "b"}]))
    with pytest.raises(UserError, match=r"mixed\.jsonl, line 2 is a Completion, the first example a PlainText"):
        mixed[1]
    with pytest.raises(UserError, match="1 examples leave none for validation"):
        split_examples(write(tmp_path / "one.jsonl", [{"text": "a"}]))


def test_a_prompt_beside_answers_that_share_messages_is_kept() -> None:
    system, shared = {"role": "system", "content": "s"}, [OTHER, {"role": "user", "content": "more"}]
    sides = {"chosen": [*shared, ANSWER], "rejected": [*shared, {**ANSWER, "content": "bad"}]}
    for prompt, whole in (
        ([system, USER], (system, USER, *shared)),
        ("user", (USER, *shared)),
        ([system, USER, *shared], (system, USER, *shared)),
    ):
        assert parse_example({**sides, "prompt": prompt}, "w").prompt == whole
    own = {name: [system, USER, *side] for name, side in sides.items()}
    for prompt in (None, "user", [system, USER]):
        assert parse_example({**own, "prompt": prompt}, "w").prompt == (system, USER, *shared)
    with pytest.raises(UserError, match="begin with other messages than prompt: keep one of both"):
        parse_example({**own, "prompt": [{"role": "user", "content": "another"}]}, "w")


def test_roles_of_other_formats_are_translated_and_unknown_ones_refused() -> None:
    names = ("human", "gpt", "function_call", "observation", "User", "model", "developer", "ipython")
    row = [{"role" if i % 2 else "from": name, "content": "a"} for i, name in enumerate(names)]
    found = [message["role"] for message in parse_example({"messages": row}, "w").messages]
    assert found == ["user", "assistant", "assistant", "tool", "user", "assistant", "developer", "ipython"]
    with pytest.raises(UserError, match=r"^w: message 1 has the unknown role narrator: use system"):
        parse_example({"messages": [{"role": "narrator", "content": "a"}]}, "w")


def test_a_system_field_is_the_first_message() -> None:
    system = {"role": "system", "content": "s"}
    for row in ({"messages": [USER]}, {"prompt": [USER], "completion": [ANSWER]}):
        (field,) = [name for name in ("messages", "prompt") if name in row]
        found = parse_example({**row, "system": "s"}, "w")
        assert getattr(found, field) == (system, USER)
        assert parse_example({**row, "system": "s", field: [system, USER]}, "w") == found
    for row, message in (
        ({"messages": [{**system, "content": "t"}, USER]}, "has the field system and another system message: keep one"),
        ({"prompt": "p", "completion": "c"}, "has the field system: write it into the prompt, and remove the field"),
    ):
        with pytest.raises(UserError, match=f"^w {message}"):
            parse_example({**row, "system": "s"}, "w")


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [
        ({"prompt": "p", "completion": "c"}, "label", False),
        ({"prompt": "p", "completion": "c"}, "label", "true"),
        ({"messages": [USER, ANSWER]}, "kto_tag", 0),
        ({"messages": [USER, ANSWER]}, "images", ["a.png"]),
        ({"messages": [USER, ANSWER]}, "functions", [{"name": "f"}]),
        ({"messages": [USER, ANSWER]}, "history", [["q", "a"]]),
        ({"messages": [USER, ANSWER]}, "documents", [{"text": "a"}]),
        ({"question": "q", "answer": "a"}, "context", "c"),
        ({"prompt": "p", "response": "c"}, "input", "i"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "margin", 0.5),
        ({"prompt": "p", "completion": "c"}, "tools", [TOOL]),
        ({"text": "a"}, "tools", [TOOL]),
    ],
)
def test_fields_that_change_what_is_learned_are_refused(row: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^w has (the field )?{name}"):
        parse_example({**row, name: value}, "w")
    assert parse_example({**row, name: None}, "w") == parse_example(row, "w")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function_call": {"name": "f"}}, "message 1 has the field function_call: it is the older form of tool_calls"),
        ({"train_detail": [1]}, "message 1 has the field train_detail"),
        ({"content": [{"type": "image_url", "image_url": "a"}]}, "message 1 has a part of the type image_url: only"),
        ({"content": ["a"]}, "message 1 has a part of the type str: only texts"),
        ({"weight": 0.5}, "message 1: weight is 0.5: an answer is in the loss or not, write 1 or 0"),
        ({"train": 1}, "message 1: train is 1: an answer is in the loss or not"),
        ({"train": True, "weight": 0}, "message 1: weight and train contradict each other: keep one"),
        ({"role": "user", "training": True}, "message 1: training is true for the role user: only answers are learned"),
    ],
)
def test_fields_of_messages_that_change_what_is_learned_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^w: {message}"):
        parse_example({"messages": [{**ANSWER, **fields}]}, "w")


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"from": "gpt", "value": "a", "content": "b"}, {"from": "gpt", "value": "assistant", "content": "assistant"}),
        (
            {"from": "human", "role": "assistant", "content": "a"},
            {"from": "gpt", "role": "gpt", "content": "assistant"},
        ),
    ],
)
def test_names_of_both_formats_in_a_message_agree(message: dict[str, Any], same: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"^w: message 1 has both (content and value|role and from), which differ: keep"
    ):
        parse_example({"messages": [message]}, "w")
    assert parse_example({"messages": [same]}, "w") == parse_example({"messages": [ANSWER]}, "w")


def test_the_field_of_a_malformed_message_is_named() -> None:
    with pytest.raises(UserError, match=r"^w: chosen is of type dict, neither text nor messages"):
        parse_example({"prompt": "q", "chosen": ANSWER, "rejected": ANSWER}, "w")
    with pytest.raises(UserError, match=r"^w: message 2 of rejected is of type str"):
        parse_example({"prompt": "q", "chosen": [ANSWER], "rejected": [ANSWER, "b"]}, "w")
    with pytest.raises(UserError, match=r"^w: messages is of type ndarray"):
        parse_example({"messages": np.array([USER, ANSWER])}, "w")


def test_fields_that_are_not_read_are_listed() -> None:
    row = {"prompt": "p", "messages": [USER], "id": 3, "score_chosen": 1.0, "source": None, "weight": 1}
    assert parse_example(row, "w").unread == ("prompt", "id", "score_chosen")
