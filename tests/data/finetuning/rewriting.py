"""Conversations for chat templates that rewrite earlier answers or open a reasoning, and what their texts must be.

The templates are written for these tests, one for each way in which published ones do so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers

from jaxtrain.data.finetuning import Encoded, ModelTokenizer, encode_example, parse_example
from jaxtrain.errors import UserError
from tests.data.finetuning.templates import SPECIAL, write_folder

_TOOLS = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}<|im_end|>{{ '\\n' }}{% endif %}"""
_LAST_QUESTION = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
_THOUGHT = """
{%- set thought, content = m.reasoning_content or '', m.content %}
{%- if '</think>' in content %}
    {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
    {%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}"""
_CALLS = """
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"""
_OTHERS = """{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + m.content + '<|im_end|>\\n' }}"""


def _chatml(answer: str, opened: str = "") -> str:
    """Return a template with the form of ChatML and another one of answers."""
    return f"""{_TOOLS}{_LAST_QUESTION}
{{%- for m in messages %}}
{{%- if m.role == 'assistant' %}}{_THOUGHT}{{{{- '<|im_start|>assistant\\n' }}}}
{answer}{_CALLS}{{{{- '<|im_end|>\\n' }}}}
{{%- else %}}{_OTHERS}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n{opened}' }}}}{{% endif %}}"""


_BLOCK = "{{- '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' }}"

TRIMMED = _chatml(
    f"{{%- if loop.index0 > ns.last and (loop.last or thought) %}}{_BLOCK}{{% endif %}}{{{{- content }}}}"
)
"""The reasoning is written after the last question only, an empty one in the last message."""
OPENED = _chatml(f"{{%- if loop.index0 > ns.last %}}{_BLOCK}{{% endif %}}{{{{- content }}}}", "<think>\\n")
"""The reasoning is written after the last question only, and the generation prompt opens it."""
UNWRITTEN = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1].lstrip() }}
{%- for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}{{ eos_token }}
{%- else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""
"""The generation prompt opens a reasoning, which no answer has; arguments of calls are texts."""
CHANNELS = """
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>' + tool | tojson + '<|end|>' }}{% endfor %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}
    {%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' %}
    {%- set thought, content = m.thinking or '', m.content %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {%- set is_later = (loop.index0 < ns.last) if m.tool_calls else not (loop.last and not add_generation_prompt) %}
    {%- if thought and not is_later %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
    {%- endif %}
    {%- if m.tool_calls %}
        {{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|channel|>commentary<|message|>' }}
        {{- content + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- else %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- endif %}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""The reasoning is a message of its own, without which earlier answers are written; the last token differs too."""
KEPT = f"""{_TOOLS}{_LAST_QUESTION}{{% for m in messages %}}
{{%- if m.role == 'assistant' %}}{_THOUGHT}{{{{- '<|assistant|>\\n<think>' }}}}
{{%- if loop.index0 > ns.last %}}{{{{ thought.strip() }}}}{{% endif %}}{{{{ '</think>\\n' + content }}}}{_CALLS}
{{%- else %}}{{{{ '<|' + m.role + '|>\\n' + m.content }}}}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|assistant|>' }}}}{{% endif %}}"""
"""Earlier answers have an empty reasoning, so that those without any are written alike; no token ends an answer."""

QUESTION, AGAIN = {"role": "user", "content": "What is 6 × 7?"}, {"role": "user", "content": "And?"}
RESULT = {"role": "tool", "content": "42"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum", "parameters": {"type": "object"}}}]


def _says(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "system", "content": "Be kind."}, QUESTION, _says("42"), AGAIN, _says("It is.")],
    "reasoning": [QUESTION, _says("42", reasoning_content="6 * 7"), AGAIN, _says("So.", reasoning_content="hm")],
    "in content": [QUESTION, _says("<think>\n6 * 7\n</think>\n\n42"), AGAIN, _says("<think>\nhm\n</think>\n\nSo.")],
    # The question at the end has no answer.
    "tools": [QUESTION, CALL, RESULT, _says("42"), AGAIN, _says("It is."), AGAIN],
    "reasoned call": [QUESTION, {**CALL, "reasoning_content": "add"}, RESULT, _says("42", reasoning_content="done")],
}
REASONED = {
    "plain": [("", "42"), ("", "It is.")],
    "reasoning": [("6 * 7", "42"), ("hm", "So.")],
    "in content": [("6 * 7", "42"), ("hm", "So.")],
}


class Rewriting(NamedTuple):
    """What is expected of a template.

    Attributes:
      texts: Number of texts of every conversation: one where the template keeps what the model wrote, until the next
        question.
      eos: The token at the end of an answer.
      refused: Messages by the names of the conversations that it refuses.
      is_unwritten: Whether its generation prompt opens a reasoning, which it writes in no answer.
    """

    texts: tuple[int, int, int, int, int]
    eos: str = "<|im_end|>"
    refused: Mapping[str, str] = {}
    is_unwritten: bool = False


TEXT_ALONE = 'can only concatenate str \\(not "dict"\\) to str'
"""Why a template that takes arguments as text refuses an object."""
CALL_REWRITTEN = "renders the messages before number 4 differently than their generation prompt"
OWN = {
    "trimmed": (TRIMMED, Rewriting((2, 2, 2, 3, 1))),
    "opened": (OPENED, Rewriting((2, 2, 2, 3, 1))),
    "unwritten": (
        UNWRITTEN,
        Rewriting((2, 2, 2, 0, 0), "</s>", {"tools": TEXT_ALONE, "reasoned call": TEXT_ALONE}, is_unwritten=True),
    ),
    "channels": (CHANNELS, Rewriting((2, 2, 2, 2, 0), "<|return|>", {"reasoned call": CALL_REWRITTEN})),
    "kept": (KEPT, Rewriting((1, 2, 2, 1, 1))),
}
"""The templates of these tests, with what is expected of them."""


def tokenizer(*more: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that makes one token of two newlines, as those of Qwen and Llama."""
    vocabulary = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(vocabulary)}, [("Ċ", "Ċ")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL, "<|return|>", "<|start|>", "<|channel|>", "<|message|>", *more])
    return made


def runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Return (start, stop) of what is in the loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.mask, [0]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def check_answers(source: str, expected: Rewriting, made: tokenizers.Tokenizer, folder: Path) -> None:
    """Check that every answer is learned once, after the prompt that the model sees, by `transformers`."""
    import transformers

    write_folder(folder, "chatml", made, chat_template=source, eos_token=expected.eos)
    texts, reference = ModelTokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for (name, messages), count in zip(CONVERSATIONS.items(), expected.texts, strict=True):
        tools = TOOLS if CALL in messages else None
        example = parse_example({"messages": messages, "tools": tools}, "w")
        if name in expected.refused:
            with pytest.raises(UserError, match=f"^w: .*{expected.refused[name]}"):
                encode_example(example, texts)
            continue
        options: dict[str, Any] = {"tools": tools, "return_dict": False}
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [reference.apply_chat_template(messages[:i], add_generation_prompt=True, **options) for i in numbers]
        wholes = [reference.apply_chat_template(messages[: i + 1], tokenize=False, **options) for i in numbers]
        found = encode_example(example, texts)
        assert len(found) == count, name
        parts = [(one, start, stop) for one in found for start, stop in runs(one)]
        for (one, start, stop), prompt, whole, i in zip(parts, prompts, wholes, numbers, strict=True):
            assert one.tokens[:start].tolist() == prompt, name
            written, before = texts.decode_all(one.tokens[start:stop]), texts.decode_all(prompt)
            if expected.is_unwritten:
                reasoning, answer = REASONED[name][numbers.index(i)]
                assert (before[-8:], written) == ("<think>\n", f"{reasoning}\n</think>\n\n{answer}{expected.eos}")
                continue
            assert before + written == whole, name
            if stop == len(one.tokens) and not before.endswith("<think>\n"):
                assert one.tokens.tolist() == reference.apply_chat_template(messages[: i + 1], **options)
