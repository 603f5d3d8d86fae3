"""A decoder with a linear head on the last token: a classifier of sequences, or with one output a reward model.

It is what `transformers` calls `…ForSequenceClassification`, of the families with the same decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models import gpt2, llama
from jaxtrain.models.files.hf_config import labels_from_hf, labels_to_hf

_WEIGHT = "score.weight"
_MAX_LABELS = 1_000_000  # their names are created before the weights are checked
_DECODERS: dict[str, ModuleType] = {"gpt2": gpt2} | {name: llama for name in llama.MODEL_TYPES if name != "mixtral"}

CLASSIFIERS = {"gpt2": "GPT2ForSequenceClassification"} | {
    name: llama.MODEL_TYPES[name].replace("ForCausalLM", "ForSequenceClassification")
    for name, module in _DECODERS.items()
    if module is llama
}
"""Class in `transformers` by model type."""


@dataclass(frozen=True)
class SequenceClassifierConfig:
    """Configuration of a `SequenceClassifier`.

    Attributes:
      decoder: Configuration of the decoder.
      labels: Names of the outputs.
      pad_token_id: Padding token, which is never the last token; None if there is none.
    """

    decoder: gpt2.GPT2Config | llama.LlamaConfig
    labels: tuple[str, ...]
    pad_token_id: int | None = None

    @property
    def model_type(self) -> str:
        """Model type in `transformers`."""
        return "gpt2" if isinstance(self.decoder, gpt2.GPT2Config) else self.decoder.model_type

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.decoder.n_embd if isinstance(self.decoder, gpt2.GPT2Config) else self.decoder.hidden_size


class SequenceClassifier(nnx.Module):
    """Classifier as `transformers`' models for sequence classification: the last token's hidden state by a kernel.

    Called as `model(tokens, rng, positions, segments)` it returns logits [B, labels], of the last token in each row
    that is not the padding token and whose segment is not 0. One label is a reward, for
    `jaxtrain.losses.bradley_terry`.

    Args:
      decoder: Decoder with `hidden` and `projection`, such as `GPT2` or `Llama`. Its parameters are at "decoder/…".
      labels: Number of outputs, or their names.
      pad_token_id: Padding token; None if there is none.
      initializer_range: Standard deviation of the initial kernel, "score" [width, labels].

    Example:
      >>> from jaxtrain.models import GPT2, GPT2Config, functional
      >>> decoder = GPT2(GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2), rngs=nnx.Rngs(0))
      >>> apply, params = functional(SequenceClassifier(decoder, 3, rngs=nnx.Rngs(1)))
      >>> apply(params, jnp.ones((2, 5), int)).shape
      (2, 3)
    """

    def __init__(
        self,
        decoder: Any,
        labels: int | Sequence[str],
        *,
        rngs: nnx.Rngs,
        pad_token_id: int | None = None,
        initializer_range: float = 0.02,
    ) -> None:
        names = tuple(labels_to_hf(labels)["label2id"]) if isinstance(labels, int) else tuple(labels)
        self.config = SequenceClassifierConfig(decoder.config, names, pad_token_id)
        self.decoder = decoder
        shape = (decoder.projection.shape[0], len(names))
        self.score = nnx.Param(nnx.initializers.normal(initializer_range)(rngs.params(), shape))

    def __call__(
        self,
        tokens: jax.Array,
        rng: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        is_text = jnp.ones(tokens.shape, bool) if segments is None else segments > 0
        if self.config.pad_token_id is not None:
            is_text &= tokens != self.config.pad_token_id
        hidden = self.decoder.hidden(tokens, rng, positions, segments)
        return last_token(hidden, is_text) @ self.score[...]


def last_token(hidden: jax.Array, is_text: jax.Array) -> jax.Array:
    """Return the hidden state [B, width] of the last token of the text in each row, of the first if it has none.

    Args:
      hidden: Hidden states [B, T, width].
      is_text: Whether a token is of the text, bool [B, T].

    Example:
      >>> hidden = jnp.arange(4.0).reshape(1, 4, 1)
      >>> float(last_token(hidden, jnp.array([[True, True, True, False]]))[0, 0])
      2.0
    """
    last = jnp.where(is_text, jnp.arange(is_text.shape[1])[None], 0).argmax(1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


def build(config: SequenceClassifierConfig, *, rngs: nnx.Rngs) -> SequenceClassifier:
    """Create the classifier of a configuration."""
    decoder = config.decoder
    return SequenceClassifier(
        gpt2.GPT2(decoder, rngs=rngs) if isinstance(decoder, gpt2.GPT2Config) else llama.Llama(decoder, rngs=rngs),
        config.labels,
        rngs=rngs,
        pad_token_id=config.pad_token_id,
        initializer_range=decoder.initializer_range,
    )


class NewHead(NamedTuple):
    """The head of a classifier that is made of a language model.

    Attributes:
      labels: Names of its outputs.
      pad_token_id: Padding token.
      seed: Seed of its initial kernel.
    """

    labels: tuple[str, ...]
    pad_token_id: int
    seed: int = 0

    def config_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the classifier that differ from those in the config.json of the language model."""
        if values.get("model_type") not in CLASSIFIERS:
            listed = ", ".join(sorted(CLASSIFIERS))
            raise UserError(f"model_type {values.get('model_type')!r} cannot have a new head: use one of {listed}")
        labels = _labels_to_hf(self.labels, self.pad_token_id)
        return {
            "architectures": [CLASSIFIERS[values["model_type"]]],
            **labels,
            "num_labels": len(self.labels),
        }

    def tensors(self, config: SequenceClassifierConfig) -> dict[str, np.ndarray]:
        """Return the initial kernel under its name in `transformers`, normal with the deviation of the decoder's."""
        draw = np.random.default_rng(self.seed)
        kernel = draw.normal(0.0, config.decoder.initializer_range, (len(config.labels), config.width))
        return {_WEIGHT: kernel.astype(np.float32)}


SHARDING = {f"decoder/({path})": spec for path, spec in (gpt2.SHARDING | llama.SHARDING).items()} | {
    "score": P("fsdp", None)
}
"""Mesh axes that shard each axis, by parameter path, of all families."""


def torch_names(config: SequenceClassifierConfig) -> NameTable:
    """Return the names in the `transformers` model of the same type."""
    decoder = _DECODERS[config.model_type].torch_names(config.decoder)
    table = {f"decoder/{path}": param for path, param in decoder.params.items()}
    return NameTable({**table, "score": TorchParam(_WEIGHT, LINEAR)})


def from_hf(config: Mapping[str, Any]) -> SequenceClassifierConfig:
    """Return the configuration of a Hugging Face config.json.

    Raises:
      UserError: As that of the decoder's family; or a text may have several labels.
    """
    if config.get("problem_type") == "multi_label_classification":
        raise UserError("problem_type 'multi_label_classification' is not supported: only one label for each text is")
    decoder = _DECODERS[config["model_type"]].from_hf(config)
    if isinstance(decoder, llama.LlamaConfig):
        # There is no kernel of a language-modeling head.
        decoder = replace(decoder, tie_word_embeddings=True)
    if not (names := config.get("id2label")):
        if (count := labels_from_hf(config)) > _MAX_LABELS:
            raise UserError(f"num_labels must be at most {_MAX_LABELS:,}, got {count:,}")
        names = labels_to_hf(count)["id2label"]
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    return SequenceClassifierConfig(decoder, labels, config.get("pad_token_id"))


def to_hf(config: SequenceClassifierConfig) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Example:
      >>> config = SequenceClassifierConfig(gpt2.GPT2Config(n_layer=3), ("bad", "good"), pad_token_id=7)
      >>> from_hf(to_hf(config)) == config
      True
    """
    return {
        **_DECODERS[config.model_type].to_hf(config.decoder),
        "architectures": [CLASSIFIERS[config.model_type]],
        **_labels_to_hf(config.labels, config.pad_token_id),
    }


def _labels_to_hf(labels: tuple[str, ...], pad_token_id: int | None) -> dict[str, Any]:
    """Return the keys of a config.json that are the classifier's own."""
    return {
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
        "problem_type": "regression" if len(labels) == 1 else "single_label_classification",
        "pad_token_id": pad_token_id,
    }
