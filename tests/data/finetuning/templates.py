"""Chat templates with the formats of ten families, a tokenizer with their special tokens, and conversations.

The templates are written for these tests: short, but with the constructs of the published ones.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL = (
    *("<unk>", "<s>", "</s>", "<pad>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
)

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson(indent=1) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA_2 = """
{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}
{% set turns = messages %}{% set system = false %}
{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.first and system %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}
{% set content = message['content'] %}
{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{% else %}{{ ' ' + content.strip() + ' ' + eos_token -}}
{% endif %}
{% endfor %}
"""

LLAMA_3 = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set system_message = "" %}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one tool call at once") }}{%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson(sort_keys=true) + '<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set last = (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{- tool.function | tojson }}{{- ', ' if not loop.last else '' }}{%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}{%- if loop.last and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] ' + message.tool_calls | map(attribute='function') | list | tojson + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""

PHI_3 = """{% for message in messages %}
{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] in ['user', 'system', 'assistant'] %}
{{ '<|' ~ message['role'] ~ '|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

QWEN_3 = """
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# SmolLM's later templates mark what the assistant writes.
SMOLLM = """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}{%- endif %}
{%- macro header(role) %}{{- '<|im_start|>' + role + '\\n' }}{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}
    {{- header(message.role) }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- (message.content or '') + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- header('assistant') }}{%- endif %}
"""

DEEPSEEK = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.content is defined %}
{%- set parts = message.content.split('</think>') %}{{ '<｜Assistant｜>' + parts | last + eos_token }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

COMMAND = """{{ bos_token }}{% for message in messages %}
{%- set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}.get(message.role) %}
{%- if not role %}{% break %}{% endif -%}
{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + (message.content or '') | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

TEMPLATES = {
    "chatml": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "llama-2": (LLAMA_2, "<s>", "</s>"),
    "llama-3": (LLAMA_3, "<|begin_of_text|>", "<|eot_id|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "gemma": (GEMMA, "<bos>", "<end_of_turn>"),
    "phi-3": (PHI_3, "<s>", "<|endoftext|>"),
    "zephyr": (ZEPHYR, "<s>", "</s>"),
    "qwen-3": (QWEN_3, "<|endoftext|>", "<|im_end|>"),
    "smollm": (SMOLLM, "<|endoftext|>", "<|im_end|>"),
    "deepseek": (DEEPSEEK, "<s>", "</s>"),
    "command": (COMMAND, "<s>", "<|END_OF_TURN_TOKEN|>"),
}
"""Template, bos token and eos token of every family."""

SYSTEM = {"role": "system", "content": "  Be kind.\n"}
QUESTION = {"role": "user", "content": "What is 6 × 7? Naïvely "}
ANSWER = {"role": "assistant", "content": "<think>\n6 * 7\n</think>\n\nIt is 42.\n"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "<é>"}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "44"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum & <more>", "parameters": {"a": {}}}}]

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "question": ([QUESTION], None),
    "one turn": ([QUESTION, ANSWER], None),
    "system": ([SYSTEM, QUESTION, {"role": "assistant", "content": " 42 👩‍🚀"}], None),
    "turns": (
        [QUESTION, ANSWER, {"role": "user", "content": "And?\r\n\t"}, {"role": "assistant", "content": "…"}],
        None,
    ),
    "reasoning": ([QUESTION, {"role": "assistant", "reasoning": "\nhm\n", "content": "42"}], None),
    "special": ([{"role": "user", "content": "</s><|im_end|> [INST]"}, {"role": "assistant", "content": "<s>"}], None),
    "tools": ([SYSTEM, QUESTION, CALL, RESULT, {"role": "assistant", "content": "44"}], TOOLS),
    "spaces": (
        [QUESTION, {"role": "assistant", "content": " 42"}, QUESTION, {"role": "assistant", "content": "42"}],
        None,
    ),
    "empty": ([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], None),
}


def byte_level() -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer with a few merges and the special tokens of all families."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["system user assistant the answer is\n\nYou are a helpful 42 add"] * 3, trainer)
    made.add_special_tokens([*SPECIAL])
    return made


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes and words that start with "▁", as those of SentencePiece."""
    vocabulary = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁aeinrstuy", "▁a", "er", "us", "user"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            [("▁", "a"), ("e", "r"), ("u", "s"), ("us", "er")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Metaspace(prepend_scheme="first"), tokenizers.decoders.ByteFallback()]
    )
    made.add_special_tokens([*SPECIAL[1:7]])
    return made


def write_folder(folder: Path, family: str, made: tokenizers.Tokenizer, **config: Any) -> Path:
    """Write the tokenizer files of a family; even families have their template in a file of its own."""
    template, bos, eos = TEMPLATES[family]
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, **config}
    if len(family) % 2 or "chat_template" in config:
        config = {"chat_template": template, **config}
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TAGGED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""A template that marks all of what the assistant writes: its prefix differences are the same texts."""
