"""Settings of a tokenizer's folder: the token ids of transformers' AutoTokenizer, or a refusal in one line."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.errors import UserError
from tests.data.finetuning.templates import byte_level, metaspace

transformers = pytest.importorskip("transformers")

TEXTS = ("Hello world", " a <new> b<|im_end|>", "", "é<|endoftext|> <new>", "(new>")


def write(folder: Path, made: tokenizers.Tokenizer, **files: dict[str, Any]) -> Path:
    """Write a tokenizer with files of settings."""
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def check(folder: Path) -> ModelTokenizer:
    """Compare the token ids and the special tokens with those of AutoTokenizer."""
    texts, reference = ModelTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert texts.encode(text).tolist() == expected, text
        assert texts.encodings([text], [False])[0].ids == reference(text)["input_ids"], text
    for role, name in (("start", "bos_token"), ("end", "eos_token")):
        if getattr(reference, name) is not None:
            assert texts.special(role) == getattr(reference, f"{name}_id"), role
    assert texts.size == len(reference)
    return texts


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast"])
def test_a_prefix_space_is_added_as_by_the_class(kind: str, tmp_path: Path) -> None:
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    # transformers fails for null with the class of GPT-2.
    values: tuple[Any, ...] = (True, False, "absent", *([None] if kind == "PreTrainedTokenizerFast" else []))
    for number, (of_file, value) in enumerate(itertools.product((True, False), values)):
        made = byte_level()
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=of_file)
        config = {"tokenizer_class": kind, **named, **({} if value == "absent" else {"add_prefix_space": value})}
        folder = write(tmp_path / str(number), made, tokenizer_config=config)
        if kind == "PreTrainedTokenizerFast" and isinstance(value, bool) and value != of_file:
            with pytest.warns(UserWarning, match=r"json has fields that are not read: add_prefix_space$"):
                check(folder)
        else:
            check(folder)


def test_settings_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    made = metaspace()
    folder = write(
        tmp_path / "a", made, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    )
    with pytest.raises(UserError, match=r"has add_prefix_space false, tokenizer\.json true: write both alike"):
        ModelTokenizer(folder)
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    folder = write(tmp_path / "b", made, tokenizer_config={"tokenizer_class": "BertTokenizer", "do_lower_case": False})
    with pytest.raises(UserError, match=r"has do_lower_case false, tokenizer\.json true: write both alike"):
        ModelTokenizer(folder)


def test_tokens_of_older_files_count_unless_the_settings_list_theirs(tmp_path: Path) -> None:
    token = {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    older = {"eos_token": "<|endoftext|>", "bos_token": token, "additional_special_tokens": ["<|im_start|>"]}
    for number, config in enumerate(
        ({}, {"eos_token": "<|im_end|>"}, {"eos_token": "<|im_end|>", "added_tokens_decoder": {"400": token}})
    ):
        files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **config}}
        folder = write(tmp_path / str(number), byte_level(), **files, special_tokens_map=older)
        if "added_tokens_decoder" in config:
            listed = "additional_special_tokens, bos_token, eos_token"
            with pytest.warns(UserWarning, match=f"special_tokens_map.json has fields that are not read: {listed}"):
                check(folder)
        else:
            check(folder)
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}}
    check(write(tmp_path / "added", byte_level(), **files, added_tokens={"<new>": 331, "<other>": 330}))
    made = byte_level()
    made.normalizer = tokenizers.normalizers.Replace("<", "(")
    files["tokenizer_config"]["bos_token"] = "<new>"
    check(write(tmp_path / "normalized", made, **files))


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_the_flags_of_added_tokens_are_those_of_transformers(flags: tuple[bool, ...], tmp_path: Path) -> None:
    token = dict(zip(("lstrip", "rstrip", "normalized"), flags, strict=True)) | {"single_word": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {"900": {"content": "<new>", **token, "special": False}},
        "split_special_tokens": flags[0] and flags[1],
    }
    check(write(tmp_path / "made", byte_level(), tokenizer_config=config))


def test_the_ends_of_a_text_are_those_of_the_file(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "add_eos_token": True}
    with pytest.warns(UserWarning, match=r"tokenizer_config\.json has fields that are not read: add_eos_token$"):
        check(write(tmp_path / "without", byte_level(), tokenizer_config=config))
    made = byte_level()
    end = made.token_to_id("<|im_end|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    check(write(tmp_path / "with", made, tokenizer_config=config))


def test_an_end_token_is_not_guessed_among_several(tmp_path: Path) -> None:
    folder = write(tmp_path / "made", byte_level(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    with pytest.raises(UserError, match=r"names no eos_token, which may be </s> or <\|im_end\|> or <\|endoftext\|>"):
        ModelTokenizer(folder).special("end")
