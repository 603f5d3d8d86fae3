"""A pretrained decoder: its linear layers, and whether it fits rows and tokenizer."""

import re
from pathlib import Path

import jax

import jaxtrain as jt
from jaxtrain.models import PretrainedModel
from jaxtrain.paths import path_name


def linear_kernels(pretrained: PretrainedModel) -> list[str]:
    """Return the paths of the kernels of all linear layers but the head: what QLoRA adapts and quantizes."""
    # Those of the blocks are stacked, [layers, in, out].
    named = ((path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(pretrained.shapes))
    return [path for path, leaf in named if path.endswith("/kernel") and leaf.ndim == 3]


def adapter_targets(pretrained: PretrainedModel, targets: str | None) -> str:
    """Return the targets of a `LoraConfig`: the linear layers, or those of them whose whole paths `targets` matches.

    Raises:
      UserError: No linear layer matches.
    """
    kernels = linear_kernels(pretrained)
    try:
        chosen = [path for path in kernels if targets is None or re.fullmatch(targets, path)]
    except re.error as error:
        raise jt.UserError(
            f"targets {targets!r} is not a regular expression ({error}): use one such as .*/kernel"
        ) from None
    if not chosen:
        raise jt.UserError(f"targets {targets!r} match no whole path of a linear layer: these are {', '.join(kernels)}")
    return "|".join(map(re.escape, chosen))


def check_decoder(pretrained: PretrainedModel, folder: Path, tokens: int, length: int) -> None:
    """Raise `UserError` unless a model is a decoder for rows of a length, of a tokenizer with so many tokens."""
    model = pretrained.model
    if not hasattr(model, "context_length"):
        raise jt.UserError(f"model {folder} is a {type(model).__name__}: use a decoder, such as a GPT-2 or a Llama")
    if length > model.context_length:
        raise jt.UserError(
            f"seq_len {length} exceeds the {model.context_length} positions of {folder}: use --seq-len "
            f"{model.context_length} or less"
        )
    if tokens > model.config.vocab_size:
        raise jt.UserError(
            f"the tokenizer of {folder} has {tokens:,} tokens, the model {model.config.vocab_size:,}: resize it with "
            "resize_token_embeddings of transformers"
        )
