"""Chat templates: the token ids and masks of transformers, in a sandbox."""

from pathlib import Path
from typing import Any

import pytest

from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.data.finetuning.examples import parse_example
from tests.data.finetuning.templates import CONVERSATIONS, TEMPLATES, byte_level, write_folder

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made() -> Any:
    return byte_level()


def reference_of(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception:
        return "refused"


@pytest.mark.parametrize("family", TEMPLATES)
def test_token_ids_are_those_of_transformers(family: str, made: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / family, family, made)
    texts, reference = ModelTokenizer(folder), reference_of(folder)
    for name, (messages, tools) in CONVERSATIONS.items():
        for prompt in (False, True):
            expected = outcome(
                lambda: reference.apply_chat_template(
                    messages,
                    tools,
                    add_generation_prompt=prompt,
                    return_dict=False,  # noqa: B023
                )
            )
            parsed = parse_example({"messages": messages, "tools": tools}, "here")
            found = outcome(
                lambda: texts.encode_chat(parsed.messages, tools, add_generation_prompt=prompt).tolist()  # noqa: B023
            )
            assert found == expected, (name, prompt)
    assert expected != "refused" or family in ("llama-2", "gemma")
