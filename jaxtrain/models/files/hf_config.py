"""Reading and writing of the keys of a Hugging Face config.json that several families share."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.records import Record, disregard, report_unread, unread_fields

# Settings of generation, of outputs, of other heads and of files: without effect on what these models compute.
_HARMLESS = (
    *(
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "tokenizer_class",
    ),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "output_past"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "gradient_checkpointing"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id"),
    *("is_encoder_decoder", "task_specific_params", "problem_type", "finetuning_task", "prefix", "n_ctx"),
    *("reorder_and_upcast_attn", "classifier_dropout", "is_decoder"),  # a precision, a head, and what a class implies
    *("id2label", "label2id", "num_labels", "_num_labels", "encoder_stride", "pooler_act", "pooler_output_size"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    *("directionality", "out_features", "out_indices", "stage_names", "no_rope_layer_interval", "max_window_layers"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
)


def report_unread_settings(config: Record, where: Any) -> None:
    """Warn in one line of the settings of a config.json that its reader has not looked up."""
    disregard(config, *_HARMLESS)
    report_unread(where, unread_fields(config))


def fields_from_hf(config: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` that a config.json sets under the same names, lists as tuples."""
    found = {field.name: config[field.name] for field in fields(kind) if field.name in config}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def require(config: Mapping[str, Any], **supported: Any) -> None:
    """Raise `UserError` for the first key whose value is not the supported one; keys may be missing.

    Example:
      >>> require({"hidden_act": "gelu"}, hidden_act="gelu", is_decoder=False)
      >>> require({"is_decoder": True}, is_decoder=False)
      Traceback (most recent call last):
          ...
      jaxtrain.errors.UserError: is_decoder True is not supported: only False is
    """
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise UserError(f"{key} {config[key]!r} is not supported: only {value!r} is")


def labels_from_hf(config: Mapping[str, Any]) -> int:
    """Return the number of classes; `transformers` writes only their names, and its default is two."""
    return int(config.get("num_labels") or len(config.get("id2label") or range(2)))


def labels_to_hf(count: int) -> dict[str, Any]:
    """Return the keys of a config.json for `count` classes, with the default names of `transformers`.

    Example:
      >>> labels_from_hf(labels_to_hf(3))
      3
    """
    names = [f"LABEL_{i}" for i in range(count)]
    return {
        "id2label": dict(zip(map(str, range(count)), names, strict=True)),
        "label2id": {n: i for i, n in enumerate(names)},
    }
