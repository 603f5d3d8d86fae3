"""The settings in `tokenizer_config.json` and the older files beside it, applied to a tokenizer as `transformers` does.

Most of them are in `tokenizer.json` too. Of those that could change the tokens of a text, each is applied, or compared
with `tokenizer.json` and refused where the two differ.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.data.files.model_folder import read_json
from jaxtrain.errors import UserError
from jaxtrain.records import Record, disregard, mark_read, report_unread, unread_fields

CONFIG = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that have a name in every tokenizer."""

_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_GENERAL_CLASSES = (None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Settings without effect on the tokens of a text that is neither cut nor padded.
_HARMLESS = (
    *("tokenizer_class", "backend", "processor_class", "name_or_path", "is_local", "local_files_only", "use_fast"),
    *("tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file", "from_slow", "model_input_names"),
    *("model_max_length", "max_len", "max_length", "stride", "truncation", "truncation_side", "truncation_strategy"),
    *("padding", "padding_side", "pad_to_multiple_of", "pad_token_type_id", "pad_token_id", "return_token_type_ids"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors", "verbose", "device_map"),
    *("legacy", "use_default_system_prompt", "sp_model_kwargs", "do_basic_tokenize", "never_split"),
    "chat_template",  # one in a file of its own comes first
)


def read_settings(folder: Path) -> Record:
    """Return the settings of a tokenizer's folder, with those of files that older versions of `transformers` wrote.

    As there, `special_tokens_map.json` and `added_tokens.json` count unless `tokenizer_config.json` lists its tokens.
    """
    config = read_json(folder, CONFIG) if (folder / CONFIG).is_file() else {}
    older = read_json(folder, _MAP) if (folder / _MAP).is_file() else {}
    if "added_tokens_decoder" in config:
        report_unread(folder / _MAP, [name for name in older if not _alike(older[name], config.get(name))])
        return Record(config)
    config = config | older
    if (folder / _ADDED).is_file():
        special = {content_of(config[name]) for name in NAMED if config.get(name)}
        numbered = sorted(read_json(folder, _ADDED).items(), key=lambda item: str(item[1]).zfill(9))
        config["added_tokens_decoder"] = {
            str(number): {"content": token, "normalized": token not in special, "special": token in special}
            for token, number in numbered
        }
    return Record(config)


def apply_settings(tokenizer: Any, config: Record, folder: Path) -> None:
    """Apply the settings to a tokenizer, whose tokens are added, and name those that are not read.

    Raises:
      UserError: A setting contradicts `tokenizer.json`.
    """
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    _apply_prefix(tokenizer, config, folder)
    _check_bert(tokenizer, config, folder)
    _mark_ends(tokenizer, config)
    disregard(config, *_HARMLESS)
    report_unread(folder / CONFIG, unread_fields(config))


def content_of(token: Any) -> Any:
    """Return the text of a token, which may be an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _alike(older: Any, newer: Any) -> bool:
    if isinstance(older, list) and isinstance(newer, list):
        return [*map(content_of, older)] == [*map(content_of, newer)]
    return bool(content_of(older) == content_of(newer))


def _apply_prefix(tokenizer: Any, config: Record, folder: Path) -> None:
    """Set whether a text starts with a space, which the class of GPT-2 takes from its settings alone."""
    kind, states = config.get("tokenizer_class"), [*_states(tokenizer.pre_tokenizer)]
    if str(kind).removesuffix("Fast") == "GPT2Tokenizer" and [state["type"] for state in states] == ["ByteLevel"]:
        pre_tokenizer = tokenizer.pre_tokenizer
        pre_tokenizer.add_prefix_space = config.get("add_prefix_space") is True
        tokenizer.pre_tokenizer = pre_tokenizer
        return
    wanted, found = dict.get(config, "add_prefix_space"), _has_prefix([*_states(tokenizer.normalizer), *states])
    if wanted in (None, found):
        mark_read(config, "add_prefix_space")
    elif found is not None and kind not in _GENERAL_CLASSES:
        raise UserError(_contradiction(folder, "add_prefix_space", wanted, found))


def _has_prefix(states: Iterable[Mapping[str, Any]]) -> bool | None:
    """Return whether a text starts with a space; None for tokenizers without spaces in their tokens."""
    found = None
    for state in states:
        if state["type"] == "ByteLevel":
            found = bool(state["add_prefix_space"])
        elif state["type"] == "Metaspace":
            found = state.get("prepend_scheme", "always") != "never"
        elif state["type"] == "Prepend":
            return True
    return found


def _states(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer, and of those in a sequence."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        state = waiting.pop(0)
        waiting += state.get("pretokenizers", state.get("normalizers", []))
        yield state


def _mark_ends(tokenizer: Any, config: Record) -> None:
    """Take `add_bos_token` and `add_eos_token` as read if tokenizer.json does what they say: it alone counts."""
    try:
        tokens = tokenizer.encode("a").tokens
    except Exception:  # tokenizers raises Exception itself; a text that cannot be encoded is reported where it is
        return
    for name, token, place in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        is_added = bool(tokens) and tokens[place] == content_of(dict.get(config, token))
        if dict.get(config, name) in (None, is_added):
            mark_read(config, name)


def _check_bert(tokenizer: Any, config: Record, folder: Path) -> None:
    normalizer = next((one for one in _states(tokenizer.normalizer) if one["type"] == "BertNormalizer"), None)
    if normalizer is None:
        return
    for name, own in _BERT.items():
        if name in config and config[name] != normalizer[own]:
            raise UserError(_contradiction(folder, name, config[name], normalizer[own]))


def _contradiction(folder: Path, name: str, wanted: Any, found: Any) -> str:
    return (
        f"{folder / CONFIG} has {name} {json.dumps(wanted)}, tokenizer.json {json.dumps(found)}: write both alike with"
        f" AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )
