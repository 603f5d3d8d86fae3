"""Published chat templates that rewrite earlier answers or open a reasoning: the model sees and writes the examples.

The templates in `published/` are those of Qwen3, Qwen3.5, DeepSeek-R1 and V3, gpt-oss and GLM-4.5, as TRL stores them
(https://github.com/huggingface/trl/tree/main/trl/chat_templates, Apache License 2.0).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxtrain.data.finetuning import Encoded, ModelTokenizer, encode_example, parse_example
from jaxtrain.errors import UserError
from tests.data.finetuning.templates import SPECIAL, write_folder

transformers = pytest.importorskip("transformers")

PUBLISHED = Path(__file__).parent / "published"
EOS = {"deepseekv3": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>"}

QUESTION, AGAIN = {"role": "user", "content": "What is 6 × 7?"}, {"role": "user", "content": "And?"}
RESULT = {"role": "tool", "content": "42"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum", "parameters": {"type": "object"}}}]


def says(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "system", "content": "Be kind."}, QUESTION, says("42"), AGAIN, says("It is.")],
    "reasoning": [QUESTION, says("42", reasoning_content="6 * 7"), AGAIN, says("So.", reasoning_content="hm")],
    "in content": [QUESTION, says("<think>\n6 * 7\n</think>\n\n42"), AGAIN, says("<think>\nhm\n</think>\n\nSo.")],
    # The question at the end has no answer.
    "tools": [QUESTION, CALL, RESULT, says("42"), AGAIN, says("It is."), AGAIN],
    "reasoned call": [QUESTION, {**CALL, "reasoning_content": "add"}, RESULT, says("42", reasoning_content="done")],
}
REASONED = {
    "plain": [("", "42"), ("", "It is.")],
    "reasoning": [("6 * 7", "42"), ("hm", "So.")],
    "in content": [("6 * 7", "42"), ("hm", "So.")],
}
NAMES = tuple(CONVERSATIONS)
TEXTS = {
    "qwen3": dict(zip(NAMES, (2, 2, 2, 3, 1), strict=True)),
    "qwen3_5_think": dict(zip(NAMES, (2, 2, 2, 3, 1), strict=True)),
    "deepseekv3": dict(zip(NAMES, (2, 2, 2, 0, 0), strict=True)),
    "gptoss": dict(zip(NAMES, (2, 2, 2, 2, 0), strict=True)),
    "glm4moe": dict(zip(NAMES, (1, 2, 2, 1, 1), strict=True)),
}
"""Number of texts of every conversation: one where the template keeps what the model wrote, until the next question."""
# The published templates refuse some: gpt-oss removes the reasoning of a call when the answer follows, DeepSeek's takes
# arguments that are text.
REFUSED = {
    ("gptoss", "reasoned call"): "renders the messages before number 4 differently than their generation prompt",
    ("deepseekv3", "tools"): 'can only concatenate str \\(not "dict"\\) to str',
    ("deepseekv3", "reasoned call"): 'can only concatenate str \\(not "dict"\\) to str',
}


@pytest.fixture(scope="module")
def made() -> Any:
    """A tokenizer that makes one token of two newlines, as those of Qwen and Llama."""
    vocabulary = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(vocabulary)}, [("Ċ", "Ċ")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL, *EOS.values(), "<|start|>", "<|channel|>", "<|message|>"])
    return made


def folder_of(root: Path, template: str, made: Any) -> Path:
    source = (PUBLISHED / f"{template}.jinja").read_text()
    return write_folder(root, "chatml", made, chat_template=source, eos_token=EOS.get(template, "<|im_end|>"))


def runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Return (start, stop) of what is in the loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.mask, [0]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", sorted(path.stem for path in PUBLISHED.glob("*.jinja")))
def test_every_answer_is_learned_once_after_the_prompt_that_the_model_sees(
    template: str, made: Any, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, template, made)
    texts, reference = ModelTokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for name, messages in CONVERSATIONS.items():
        tools = TOOLS if CALL in messages else None
        example = parse_example({"messages": messages, "tools": tools}, "w")
        if (template, name) in REFUSED:
            with pytest.raises(UserError, match=f"^w: .*{REFUSED[template, name]}"):
                encode_example(example, texts)
            continue
        options: dict[str, Any] = {"tools": tools, "return_dict": False}
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [reference.apply_chat_template(messages[:i], add_generation_prompt=True, **options) for i in numbers]
        wholes = [reference.apply_chat_template(messages[: i + 1], tokenize=False, **options) for i in numbers]
        found = encode_example(example, texts)
        assert len(found) == TEXTS[template][name], name
        parts = [(one, start, stop) for one in found for start, stop in runs(one)]
        for (one, start, stop), prompt, whole, i in zip(parts, prompts, wholes, numbers, strict=True):
            assert one.tokens[:start].tolist() == prompt, name
            written, before = texts.decode_all(one.tokens[start:stop]), texts.decode_all(prompt)
            if template == "deepseekv3":  # Its generation prompt opens a reasoning, which it writes in no answer.
                reasoning, answer = REASONED[name][numbers.index(i)]
                assert (before[-8:], written) == ("<think>\n", f"{reasoning}\n</think>\n\n{answer}{EOS[template]}")
                continue
            assert before + written == whole, name
            if stop == len(one.tokens) and not before.endswith("<think>\n"):
                assert one.tokens.tolist() == reference.apply_chat_template(messages[: i + 1], **options)
