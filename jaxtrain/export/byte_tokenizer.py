"""The tokenizer of a decoder of bytes, as files that `transformers` and `jaxtrain train finetune` read.

A token is a byte. Special tokens, which conversations and the ends of answers need, take the places of bytes that UTF-8
never uses, so that the vocabulary remains the model's 256.
"""

from pathlib import Path

from jaxtrain.models import write_json

SIZE = 256
_SPECIAL = {"<|pad|>": 251, "<|system|>": 252, "<|user|>": 253, "<|assistant|>": 254, "<|end|>": 255}
_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|' + message.role + '|>' + message.content + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes with special tokens, a chat template, and the token that ends a text.

    Args:
      folder: Folder of the model, whose vocabulary has `SIZE` tokens.
    """
    write_json(folder, "tokenizer.json", _tokenizer())
    entries = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "clean_up_tokenization_spaces": False}
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **entries})
    ends = {"eos_token_id": _SPECIAL["<|end|>"], "pad_token_id": _SPECIAL["<|pad|>"]}
    write_json(folder, "generation_config.json", ends)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, "utf-8")


def _tokenizer() -> dict[str, object]:
    """Return the contents of a tokenizer.json."""
    special = set(_SPECIAL.values())
    vocabulary = {character: byte for byte, character in enumerate(_characters()) if byte not in special}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in _SPECIAL.items()],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": vocabulary | _SPECIAL, "merges": []},
    }


def _characters() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level tokenizer, as in GPT-2's."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(SIZE, 2 * SIZE))
    return [chr(byte if byte in printable else next(others)) for byte in range(SIZE)]
