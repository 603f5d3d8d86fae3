"""Fine-tuning of a pretrained language model on your examples: all weights or adapters, answers or preferences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import jaxtrain as jt
from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.models import LoraConfig, folder_digest, save_adapters
from jaxtrain.recipes.finetuning.answers import reply
from jaxtrain.recipes.finetuning.example_rows import FineTuningRows, show, summaries
from jaxtrain.recipes.finetuning.finetuning_settings import FineTuneSettings
from jaxtrain.recipes.finetuning.heads import head_task
from jaxtrain.recipes.finetuning.held_out_answers import HeldOutAnswers
from jaxtrain.recipes.finetuning.losses import preference_loss, supervised_loss
from jaxtrain.recipes.finetuning.opened_decoder import open_decoder
from jaxtrain.recipes.finetuning.pretrained_decoder import Decoder, adapter_targets, check_decoder, out_in_targets
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel


@dataclass(frozen=True, kw_only=True)
class FineTuneRecipe(FineTuneSettings):
    """A pretrained language model, --model FOLDER in Hugging Face layout, trained on --data FILE: texts, prompts with
    completions, conversations or preferences, in JSON lines, Parquet or Arrow."""

    def task(self) -> jt.Task:
        """Open the model and the examples; the weights are read when the run starts."""
        if self.loss in ("reward", "classification"):
            return head_task(self, self.fine_tuned)
        folder, data = self.checked_paths()
        texts, is_dpo = self.tokenizer(folder), self.loss == "dpo"
        rows = self.batch_size // self.accumulate * (2 if is_dpo else 1)
        decoder = open_decoder(folder, rows, self.seq_len, packed=self.packing and not is_dpo)
        check_decoder(decoder, folder, texts.size, self.seq_len)
        model = self.fine_tuned(decoder)
        supervised = partial(supervised_loss, model, self.normalize == "sequence")
        train, validation = self.rows(data, texts)
        answers = HeldOutAnswers(
            model=model,
            rows=validation,
            texts=texts,
            shown=self.answers or 0,
            scored=self.scored_answers or 0,
            new_tokens=self.answer_tokens,
            batch_tokens=self.batch_size // self.accumulate * self.seq_len,
        )

        def predict(params: Any, batch: Any, model_state: Any) -> jt.Predictions:
            del model_state
            return jt.Predictions(model.logits(params, batch), batch["targets"], batch["weight"])

        def answer_messages(params: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> Iterator[str]:
            return reply(decoder, model.adapted(params), texts, messages, is_chat=train.has_messages, **options)

        def write_adapters(path: Path, params: Any) -> None:
            assert model.config is not None
            where, names = str(folder.absolute()), decoder.weights.names
            save_adapters(path, params["lora"], model.config, names, base=where, task_type="CAUSAL_LM")

        return jt.Task(
            init=model.init,
            load=model.load,
            digests=partial(folder_digest, folder),
            loss_fn=partial(preference_loss, model, self.beta) if is_dpo else supervised,
            predict=None if is_dpo else predict,
            signature=decoder.signature(self.seq_len, texts.special("pad")),
            save_pretrained=decoder.save_pretrained,
            exported=None if model.frozen is None else jax.jit(model.merged),
            save_adapters=None if model.config is None else write_adapters,
            on_stored_base=None if model.config is None else model.on_stored_base,
            pretrained=folder,
            texts=texts,
            train=train.source,
            validation=validation.source,
            eval_rows=min(self.eval_rows, len(validation.source)),
            evaluate_answers=answers.evaluate if answers.asked else None,
            best_metric=self.best_metric,
            is_highest_best=self.best_metric != "loss",
            unit="tokens",
            units_per_row=self.seq_len * (2 if is_dpo else 1),
            bounds=train.bounds,
            description={
                "model": f"{decoder.kind} of {folder}",
                **{name: "; ".join(sentences) for name, sentences in summaries(train, validation).items()},
                **answers.describe(),
            },
            sample=answers.sample if answers.asked else None,
            reply=answer_messages,
            show_data=partial(show, train, validation),
            frozen=model.frozen,
            unsaved=model.frozen,
            sharding=model.sharding,
            no_decay=decoder.no_decay,
            names=decoder.weights.names if model.frozen is None else None,
        )

    def fine_tuned(self, decoder: Decoder) -> FineTunedModel:
        """Return the model that the settings make of a pretrained one."""
        is_full, is_dpo = self.method == "full", self.loss == "dpo"
        targets, dropout = adapter_targets(decoder, self.targets), 0.0 if is_dpo else self.lora_dropout
        dora, out_in = self.method == "dora", out_in_targets(decoder)
        config = LoraConfig(targets, self.rank, self.alpha, dropout, dora=dora, out_in=out_in)
        return FineTunedModel(
            decoder=decoder,
            config=None if is_full else config,
            quantized=self.quantize == "nf4",
            keeps_base=is_full and is_dpo,
            neftune=self.neftune,
            seed=self.seed,
        )

    def rows(self, data: Path, texts: ModelTokenizer) -> tuple[FineTuningRows, FineTuningRows]:
        """Return (train, validation)."""
        is_dpo, files = self.loss == "dpo", self.example_files(data)
        train, held_out = (FineTuningRows(x, texts, self.seq_len, is_dpo, self.packing) for x in files)
        return train, held_out
