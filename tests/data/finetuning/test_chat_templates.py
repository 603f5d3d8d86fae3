"""Chat templates: the token ids and masks of transformers, in a sandbox."""

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.finetuning import ChatTemplate, Conversation, ModelTokenizer, encode_example, parse_example
from jaxtrain.errors import UserError
from tests.data.finetuning.templates import CONVERSATIONS, TAGGED, TEMPLATES, byte_level, metaspace, write_folder

transformers = pytest.importorskip("transformers")

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def made() -> Any:
    return byte_level()


def reference_of(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def with_exact_offsets(reference: Any) -> Any:
    """Return a tokenizer whose offsets have all characters, so that its masks of blocks miss none."""
    if type(reference.backend_tokenizer.post_processor) is tokenizers.processors.ByteLevel:
        reference.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    return reference


def outcome(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception:
        return "refused"


def check_ids(folder: Path) -> int:
    """Compare the ids of all conversations, and return how many of them are not refused."""
    texts, reference = ModelTokenizer(folder), reference_of(folder)
    rendered = 0
    for name, (messages, tools) in CONVERSATIONS.items():
        for prompt in (False, True):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
            expected = outcome(reference.apply_chat_template, messages, return_dict=False, **options)
            parsed = parse_example({"messages": messages}, "here").messages
            found = outcome(lambda: texts.encode_chat(parsed, **options).tolist())  # noqa: B023
            assert found == expected, (name, prompt)
            rendered += found != "refused"
    return rendered


@pytest.mark.parametrize("family", TEMPLATES)
def test_token_ids_are_those_of_transformers(family: str, made: Any, tmp_path: Path) -> None:
    # These formats have no system message, or no message without content.
    fewer = {"gemma": 4, "llama-2": 2, "phi-3": 2, "zephyr": 2}.get(family, 0)
    assert check_ids(write_folder(tmp_path, family, made)) == 2 * len(CONVERSATIONS) - fewer


def test_added_tokens_and_named_templates_are_those_of_transformers(tmp_path: Path) -> None:
    token = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
    config = {
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{% for m in messages %}<new>  {{ m.content }}{% endfor %}"},
            {"name": "tool_use", "template": "{{ tools | length }} {{ sep_token }}{{ messages[0].content }}"},
        ],
        "added_tokens_decoder": {"999": {"content": "<new>", **token}},
        "pad_token": {"__type": "AddedToken", "content": "<pad!>", **token},
        "sep_token": "<0x41>",
        "image_token": "<image>",
        "extra_special_tokens": ["What"],
    }
    folder = write_folder(tmp_path, "zephyr", metaspace(), **config)
    assert check_ids(folder) == 2 * len(CONVERSATIONS)
    texts, reference = ModelTokenizer(folder), reference_of(folder)
    assert texts.size == len(reference)
    assert texts.special("pad") == reference.pad_token_id
    assert [texts.special("start"), texts.special("end")] == [reference.bos_token_id, reference.eos_token_id]
    assert texts.encode("What<image> <new>  a<pad!>  b").tolist() == reference.encode("What<image> <new>  a<pad!>  b")
    assert pickle.loads(pickle.dumps(texts)).identity() == texts.identity()


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("template", ["tagged", "smollm"])
def test_generation_masks_are_those_of_transformers(template: str, make: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "smollm", make(), **({"chat_template": TAGGED} if template == "tagged" else {}))
    texts, reference = ModelTokenizer(folder), with_exact_offsets(reference_of(folder))
    for name, (messages, tools) in CONVERSATIONS.items():
        options = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = outcome(reference.apply_chat_template, messages, **options)
        if expected == "refused":
            continue
        if name in ("reasoning", "tools"):  # which transformers leaves out without a word
            with pytest.raises(UserError, match=r"does not write (reasoning|tool_calls of message 3|tools)"):
                encode_example(parse_example({"messages": messages, "tools": tools}, "here"), texts)
            continue
        (found,) = encode_example(parse_example({"messages": messages, "tools": tools}, "here"), texts)
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.mask.astype(int).tolist() == expected["assistant_masks"], name


@pytest.fixture(scope="module")
def tagged_and_not(made: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelTokenizer]:
    root = tmp_path_factory.mktemp("tagged")
    bare = TAGGED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    reference = with_exact_offsets(reference_of(write_folder(root / "tagged", "smollm", made, chat_template=TAGGED)))
    return reference, ModelTokenizer(write_folder(root / "bare", "smollm", made, chat_template=bare))


CONTENT = st.lists(st.sampled_from(["a", " ", "\n", "é", "👩‍🚀", "\x00", "<|im_end|>", "assistant\n"]), max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": CONTENT.map("".join)}),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40)
@given(MESSAGES)
def test_prefix_differences_are_the_generation_blocks_of_transformers(
    tagged_and_not: tuple[Any, ModelTokenizer], messages: list[Any]
) -> None:
    reference, texts = tagged_and_not
    (found,) = encode_example(Conversation(tuple(messages), None, "here"), texts)
    expected = reference.apply_chat_template(messages, return_assistant_tokens_mask=True)
    assert found.tokens.tolist() == expected["input_ids"]
    assert found.mask.astype(int).tolist() == expected["assistant_masks"]
    assert len(found.tokens) == len(found.mask)
    assert texts.decode_all(found.tokens) == texts.chat_template().render(messages)


def test_answers_are_masked_by_family(made: Any, tmp_path: Path) -> None:
    turns = [*USER, {"role": "assistant", "content": "A1"}, *USER, {"role": "assistant", "content": "A2"}]
    expected = {
        "chatml": ["A1<|im_end|>\n", "A2<|im_end|>\n"],
        "llama-2": [" A1 </s>", " A2 </s>"],
        "llama-3": ["A1<|eot_id|>", "A2<|eot_id|>"],
        "gemma": ["A1<end_of_turn>\n", "A2<end_of_turn>\n"],
        # The token at the end of the conversation belongs to the last answer.
        "phi-3": ["A1<|end|>\n", "A2<|end|>\n<|endoftext|>"],
        "deepseek": ["A1</s>", "A2</s>"],
    }
    for family, answers in expected.items():
        texts = ModelTokenizer(write_folder(tmp_path / family, family, made))
        (found,) = encode_example(parse_example({"messages": turns}, "here"), texts)
        assert texts.decode_all(found.tokens[found.mask]) == "".join(answers), family
        edges = found.mask.astype(int)
        assert (edges[1:] > edges[:-1]).sum() == 2, family


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ namespace(_x=1) }}", "the attribute '_x' of a namespace starts with an underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "the attribute '_x' of a namespace"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ raise_exception('no such role') }}", r"does not render the conversation \(no such role\)"),
        ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
        ("{% import os %}", "line 1 is not a valid chat template"),
        ("\n{% if %}", "line 2 is not a valid chat template"),
    ],
)
def test_templates_run_in_a_sandbox_and_their_errors_are_one_line(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        ChatTemplate(template, "t.jinja", {}, datetime(2026, 1, 1)).render(USER)
    assert "\n" not in str(raised.value)


def test_the_date_of_a_template_is_fixed_and_part_of_the_identity(made: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama-3", made)
    texts = ModelTokenizer(folder, datetime(2024, 7, 26))
    assert "Today Date: 26 Jul 2024\n" in texts.chat_template().render(USER)
    assert pickle.loads(pickle.dumps(texts)).encode_chat(USER).tolist() == texts.encode_chat(USER).tolist()
    assert ModelTokenizer(folder, datetime(2024, 7, 27)).identity() != texts.identity()


def test_the_truncation_and_padding_in_a_tokenizer_file_are_not_applied(tmp_path: Path) -> None:
    limited = byte_level()
    limited.enable_truncation(3)
    limited.enable_padding(length=8)
    texts = ModelTokenizer(write_folder(tmp_path, "chatml", limited))
    assert [texts.decode(texts.encode(text)) for text in ("a longer text", "a")] == ["a longer text", "a"]


def test_folders_without_what_is_needed_are_reported(made: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json: write one with AutoTokenizer"):
        ModelTokenizer(tmp_path)
    folder = write_folder(tmp_path, "chatml", made)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template, which messages need"):
        ModelTokenizer(folder).encode_chat(USER)
    for name, value, message in (
        ("eos_token", 3, "eos_token is 3, not text"),
        ("added_tokens_decoder", {"x": 1}, "lists its tokens wrongly"),
        ("chat_template", 3, "is neither text nor a list of named templates"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(UserError, match=message):
            ModelTokenizer(folder)
