"""Fine-tuning of a pretrained language model on your examples: all weights or adapters, answers or preferences."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.data import MappedSource
from jaxtrain.data.finetuning import (
    EncodedExamples,
    ExampleFiles,
    FineTuningExample,
    ModelTokenizer,
    RowSummary,
    encode_examples,
    preference_rows,
    print_examples,
    read_examples,
    split_examples,
    supervised_rows,
)
from jaxtrain.models import PretrainedModel, open_pretrained, save_adapters
from jaxtrain.recipes.answers import answer, answer_table, questions, reply
from jaxtrain.recipes.finetuned_model import FineTunedModel, adapter_config
from jaxtrain.run import Input, Signature

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class FineTuneRecipe(jt.Recipe):
    """A pretrained language model, --model FOLDER in Hugging Face layout, trained on --data FILE: texts, prompts with
    completions, conversations or preferences, in JSON lines, Parquet or Arrow."""

    model: Path | None = None
    """Folder of the pretrained model, with its tokenizer; for conversations also its chat template."""
    data: Path | None = None
    """Examples: a file, a folder of files, or a dataset saved by `datasets`."""
    validation: Path | None = None
    """Held-out examples; None takes those that the data name as such, or a share of them."""
    validation_fraction: float = 0.1
    """Share of the examples that is held out, if nothing else is."""
    method: Literal["lora", "dora", "full"] = "lora"
    """Train low-rank adapters, adapters with the norms of columns (DoRA), or all weights."""
    quantize: Literal["none", "nf4"] = "none"
    """Store the frozen kernels in 4 bits (QLoRA)."""
    loss: Literal["supervised", "dpo"] = "supervised"
    """Learn answers, or which of two answers is preferred."""
    steps: int = 300
    # The settings of Dettmers et al. (2023), "QLoRA", for 7B and 13B models: batches of 16, learning rate 2e-4, beta2
    # 0.999, no weight decay; 3% of the updates of this recipe warm up. A full fine-tuning takes 2e-5, the default of
    # TRL's SFTConfig; DPO 1e-6, that of its DPOConfig.
    batch_size: int = 16
    lr: float = 2e-4
    """Peak learning rate: 2e-5 is common for --method full, 1e-6 for --loss dpo, and 5e-6 for it with adapters."""
    beta2: float = 0.999
    weight_decay: float = 0.0
    warmup_steps: int = 10
    schedule: str = "linear"  # of transformers.TrainingArguments
    # Of TRL's SFTConfig.
    seq_len: int = 1024
    """Number of predictions of a row, in tokens; longer examples lose their end."""
    packing: bool = True
    """Place as many examples in a row as fit, without attention between them; preferences are padded."""
    # Rank, alpha and dropout of TRL's ModelConfig; adapters on all linear layers as in QLoRA.
    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """The product of the adapters is multiplied by alpha / rank."""
    lora_dropout: float = 0.05
    """Dropout rate on the inputs of the adapters; preferences are learned without."""
    targets: str | None = None
    """Regular expression of the paths of the kernels with adapters, such as ".*/[qv]_proj/kernel"; None for all linear
    layers but the head."""
    beta: float = 0.1  # of Rafailov et al. (2023), and TRL's DPOConfig
    """Factor of the rewards of --loss dpo: the larger, the nearer the model stays to the one before."""
    neftune: float | None = None
    """Size of the noise on the embeddings of tokens (NEFTune); 5 is the paper's, None for none."""
    answers: int | None = 2
    """Number of held-out prompts that are answered at every evaluation; None for none."""
    answer_tokens: int = 64
    """Number of tokens of the longest of these answers."""
    eval_rows: int = 128
    """Largest number of validation rows per evaluation."""

    def task(self) -> jt.Task:
        """Open the model and the examples; the weights are read when the run starts."""
        folder, data = self._checked()
        texts = ModelTokenizer(folder)
        pretrained = open_pretrained(folder)
        self._check_model(pretrained, texts)
        model = self._fine_tuned(pretrained)
        files = self._examples(data)
        examples = [encode_examples(part, texts) for part in files]
        (rows, train, summary), (_, validation, held_out) = (self._rows(encoded, texts) for encoded in examples)
        decoder: Any = pretrained.model
        asked = questions(examples[1], texts, self.answers or 0, decoder.context_length - self.answer_tokens)
        is_chat = _has_messages(files[0][0])
        merged = jax.jit(model.merged)

        def answers(state: jt.TrainState) -> list[str]:
            return answer(decoder, merged(state.params), asked, texts, self.answer_tokens)

        def evaluate(state: jt.TrainState, batches: Iterator[Any]) -> Mapping[str, Any]:
            del batches  # the loss is evaluated on them
            return {"answers": answer_table(asked, answers(state), texts)}

        def predict(params: Any, batch: Any, model_state: Any) -> jt.Predictions:
            del model_state
            return jt.Predictions(model.logits(params, batch), batch["targets"], batch["weight"])

        def continue_text(params: Any, prompt: str, **options: Any) -> Iterator[str]:
            return reply(decoder, merged(params), texts, prompt, is_chat=is_chat, **options)

        def show_data() -> None:
            print_examples(rows, texts)
            print(*summary.lines(), sep="\n")

        def write_adapters(path: Path, params: Any) -> None:
            assert model.config is not None
            save_adapters(path, params["lora"], model.config, pretrained.names, base=str(folder))

        is_dpo = self.loss == "dpo"
        bounds = {"tokens": texts.size, "targets": texts.size, "positions": self.seq_len}
        return jt.Task(
            init=model.init,
            loss_fn=partial(self._preference_loss if is_dpo else _supervised_loss, model),
            predict=None if is_dpo else predict,
            signature=Signature(
                decoder,
                {"tokens": Input((self.seq_len,), np.int32, texts.special("pad"))},
                lambda call, tokens: call(tokens),
                "tokens",
            ),
            exported=None if model.frozen is None else merged,
            save_adapters=None if model.config is None else write_adapters,
            texts=texts,
            train=train,
            validation=validation,
            eval_rows=min(self.eval_rows, len(validation)),
            evaluate=evaluate if asked else None,
            unit="tokens",
            units_per_row=self.seq_len * (2 if is_dpo else 1),
            bounds={**bounds, "segments": self.seq_len + 1},
            description={
                "model": f"{type(decoder).__name__} of {folder}",
                "examples": "; ".join(summary.lines()),
                "held out": "; ".join(held_out.lines()),
            },
            sample=(lambda state, seed: answers(state)[0]) if asked else None,
            continue_text=continue_text,
            show_data=show_data,
            frozen=model.frozen,
            unsaved=model.frozen,
            sharding=model.sharding,
            names=pretrained.names if model.frozen is None else None,
        )

    def _checked(self) -> tuple[Path, Path]:
        """Return the folder and the data. Raises `UserError` for a setting that cannot work."""
        for name in ("model", "data", "validation"):
            path = getattr(self, name)
            if path is not None and not path.exists():
                raise jt.UserError(f"{name} {path} does not exist: give a local folder or file")
        for name in ("alpha", "beta", "neftune"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _LARGEST:
                raise jt.UserError(f"{name} must be positive and representable in float32, got {value}")
        if not 0 <= self.lora_dropout < 1:
            raise jt.UserError(f"lora_dropout must be in [0, 1), got {self.lora_dropout}")
        if not 0 < self.validation_fraction < 1:
            raise jt.UserError(f"validation_fraction must be in (0, 1), got {self.validation_fraction}")
        if self.quantize != "none" and self.method == "full":
            raise jt.UserError(f"quantize {self.quantize} needs frozen weights: use --method lora, or --quantize none")
        if self.quantize != "none" and self.precision == "bf16_params":
            raise jt.UserError(f"quantize {self.quantize} needs its scales in float32: use --precision bf16")
        if self.model is None or self.data is None:
            raise jt.UserError("fine-tuning needs a model and examples: use --model FOLDER --data FILE")
        return self.model, self.data

    def _check_model(self, pretrained: PretrainedModel, texts: ModelTokenizer) -> None:
        """Raise `UserError` unless the model is a decoder for the rows and the tokenizer."""
        decoder = pretrained.model
        if not hasattr(decoder, "context_length"):
            raise jt.UserError(f"model {self.model} is a {type(decoder).__name__}: use a decoder, such as a GPT-2 or Llama")
        if self.seq_len > decoder.context_length:
            raise jt.UserError(
                f"seq_len {self.seq_len} exceeds the {decoder.context_length} positions of {self.model}: use --seq-len "
                f"{decoder.context_length} or less"
            )
        if texts.size > decoder.config.vocab_size:
            raise jt.UserError(
                f"the tokenizer of {self.model} has {texts.size:,} tokens, the model {decoder.config.vocab_size:,}: "
                "resize its embeddings with resize_token_embeddings of transformers"
            )

    def _fine_tuned(self, pretrained: PretrainedModel) -> FineTunedModel:
        dropout = 0.0 if self.loss == "dpo" else self.lora_dropout
        return FineTunedModel(
            pretrained=pretrained,
            config=None
            if self.method == "full"
            else adapter_config(
                pretrained,
                self.targets,
                rank=self.rank,
                alpha=self.alpha,
                dropout=dropout,
                dora=self.method == "dora",
            ),
            quantized=self.quantize == "nf4",
            keeps_base=self.method == "full" and self.loss == "dpo",
            neftune=self.neftune,
            seed=self.seed,
        )

    def _examples(self, data: Path) -> tuple[ExampleFiles, ExampleFiles]:
        """Return (train, validation)."""
        if self.validation is None:
            return split_examples(data, self.validation_fraction)
        return read_examples(data), read_examples(self.validation)

    def _rows(self, examples: EncodedExamples, texts: ModelTokenizer) -> tuple[Any, Any, RowSummary]:
        """Return (rows, the same as a batch has them, summary)."""
        pad = texts.special("pad")
        if self.loss == "supervised":
            rows, summary = supervised_rows(examples, self.seq_len, pad, packing=self.packing)
            return rows, rows, summary
        pairs, summary = preference_rows(examples, self.seq_len, pad)
        return pairs, MappedSource(pairs, _flat), summary

    def _preference_loss(self, model: FineTunedModel, params: Any, batch: Any, rng: Any) -> tuple[jt.Loss, Any]:
        """Return the DPO loss of pairs, and the accuracy and the margin of their rewards.

        As in TRL there is no dropout, so that the rewards are 0 at the start.
        """
        del rng
        texts = {name: x.reshape(-1, self.seq_len) for name, x in batch.items()}

        def answers(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
            sums = (log_probs * texts["weight"]).sum(-1).reshape(-1, 2)
            return sums[:, 0], sums[:, 1]

        chosen, rejected = answers(model.log_probs(params, texts, None))
        base_chosen, base_rejected = answers(jax.lax.stop_gradient(model.base_log_probs(params, texts)))
        is_pair = batch["weight"].max(-1) > 0  # not padding of an evaluation
        margin = self.beta * ((chosen - base_chosen) - (rejected - base_rejected))
        metrics = {
            "reward_accuracy": jt.Loss.of((margin > 0).astype(margin.dtype), is_pair),
            "reward_margin": jt.Loss.of(margin, is_pair),
        }
        found = losses.dpo(chosen, rejected, base_chosen, base_rejected, beta=self.beta)
        return jt.Loss.of(found, is_pair), metrics


def _supervised_loss(model: FineTunedModel, params: Any, batch: Any, rng: Any) -> tuple[jt.Loss, Any]:
    """Return the loss of the answers' tokens."""
    return losses.supervised(-model.log_probs(params, batch, rng), batch["weight"]), {}


def _flat(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair [2, T] as one row [2 · T]."""
    return {name: x.reshape(-1) for name, x in pair.items()}


def _has_messages(example: FineTuningExample) -> bool:
    return hasattr(example, "messages") or not isinstance(getattr(example, "prompt", ""), str)
