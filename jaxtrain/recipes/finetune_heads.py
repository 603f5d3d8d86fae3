"""Fine-tuning of a language model with a head on its last token: a reward model, or a classifier of texts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.data import MappedSource, Source
from jaxtrain.data.finetuning import (
    ExampleFiles,
    ModelTokenizer,
    WholeTexts,
    WholeTextSummary,
    encode_examples,
    encode_labelled,
    label_names,
    label_numbers,
    labelled_rows,
    parse_example,
    parse_labelled,
    print_examples,
    reward_rows,
)
from jaxtrain.models import (
    CLASSIFIERS,
    CONFIG,
    NewHead,
    PretrainedModel,
    SequenceClassifier,
    folder_digest,
    open_pretrained,
    read_json,
    save_adapters,
)
from jaxtrain.recipes.decoder import Decoder, check_decoder
from jaxtrain.recipes.finetune_settings import FineTuneSettings
from jaxtrain.recipes.finetuned_model import FineTunedModel
from jaxtrain.recipes.zoo_decoder import ZooDecoder
from jaxtrain.run import Input, Signature, row_weights


def head_task(settings: FineTuneSettings, fine_tuned: Callable[[Decoder], FineTunedModel]) -> jt.Task:
    """Open the model and the examples of a run with --loss reward or --loss classification.

    Args:
      settings: Settings of the run.
      fine_tuned: Returns what is trained of a model, its head left out.
    """
    folder, data = settings.checked_paths()
    if settings.best_metric != "loss":
        raise jt.UserError(f"best_metric {settings.best_metric} is for --loss supervised and dpo: use loss")
    is_reward = settings.loss == "reward"
    texts, files = (
        settings.tokenizer(folder),
        settings.example_files(data, parse_example if is_reward else parse_labelled),
    )
    pretrained = open_classifier(folder, texts.special("pad"), settings.seed, None if is_reward else files[0])
    classifier: SequenceClassifier = pretrained.model
    labels, pad = classifier.config.labels, classifier.config.pad_token_id
    decoder = ZooDecoder(replace(pretrained, model=classifier.decoder))
    check_decoder(decoder, folder, texts.size, settings.seq_len)
    assert pad is not None
    train, validation = (_HeadRows(x, texts, settings.seq_len, pad, () if is_reward else labels) for x in files)
    model = _with_head(fine_tuned(ZooDecoder(pretrained)), is_reward)

    def predict(params: Any, batch: Any, model_state: Any) -> Any:
        del model_state
        if is_reward:
            return rewards(model, params, batch)
        return jt.Predictions(model.scores(params, batch["tokens"], None), batch["label"], _weights(batch))

    def write_adapters(path: Path, params: Any) -> None:
        assert model.config is not None
        where = str(folder.absolute())
        save_adapters(path, params["lora"], model.config, pretrained.names, base=where, task_type="SEQ_CLS")

    center = settings.center_rewards
    return jt.Task(
        init=model.init,
        load=model.load,
        digests=partial(folder_digest, folder),
        loss_fn=partial(reward_loss, model, center) if is_reward else partial(classification_loss, model),
        predict=predict,
        signature=Signature(
            classifier,
            {"tokens": Input((settings.seq_len,), np.int32, pad)},
            lambda call, tokens: call(tokens),
        ),
        exported=None if model.frozen is None else jax.jit(model.merged),
        save_adapters=None if model.config is None else write_adapters,
        pretrained=folder,
        texts=texts,
        class_names=() if is_reward else labels,
        input_text=None if is_reward else lambda example: texts.decode(example["tokens"][example["tokens"] != pad]),
        train=train.source,
        validation=validation.source,
        eval_rows=min(settings.eval_rows, len(validation.source)),
        classes=None if is_reward else len(labels),
        unit="tokens",
        units_per_row=train.rows.length * (2 if is_reward else 1),
        bounds={"tokens": texts.size},
        description={
            "model": f"{decoder.kind} of {folder}",
            "examples": "; ".join(train.summary),
            "held out": "; ".join(validation.summary),
        },
        baselines=dict if is_reward else validation.baselines,
        references={"a guess": float(np.log(2))} if is_reward else {},
        show_data=train.show,
        frozen=model.frozen,
        unsaved=model.frozen,
        sharding=model.sharding,
        names=pretrained.names if model.frozen is None else None,
    )


def open_classifier(folder: Path, pad: int, seed: int, examples: ExampleFiles | None) -> PretrainedModel:
    """Open a classifier with its head, or a language model with a new one.

    Args:
      folder: Folder of the model.
      pad: Padding token of a new head.
      seed: Seed of a new head.
      examples: Labelled texts, whose labels a new head has; None for a reward.

    Raises:
      UserError: The head of the folder does not fit, or its model has none here.
    """
    model_type = read_json(folder, CONFIG).get("model_type")
    if model_type not in CLASSIFIERS:
        listed = ", ".join(sorted(CLASSIFIERS))
        raise jt.UserError(f"model_type {model_type!r} of {folder} has no head here: use a model of {listed}")
    opened = open_pretrained(folder)
    if not isinstance(opened.model, SequenceClassifier):
        labels = ("reward",) if examples is None else label_names(examples)
        return open_pretrained(folder, new_head=NewHead(labels, pad, seed))
    outputs = len(opened.model.config.labels)
    if (outputs == 1) != (examples is None):
        loss = "reward" if outputs == 1 else "classification"
        raise jt.UserError(f"the head of {folder} has {outputs} output{'s'[: outputs - 1]}: use --loss {loss}")
    if opened.model.config.pad_token_id is None:
        raise jt.UserError(
            f"{folder}/config.json has no pad_token_id, which ends a text: add that of the tokenizer, {pad}"
        )
    return opened


def rewards(model: FineTunedModel, params: Any, batch: Mapping[str, Any], rng: jax.Array | None = None) -> jax.Array:
    """Return the rewards of the chosen and the rejected texts, float [B, 2].

    Args:
      model: The model.
      params: Its params.
      batch: `tokens`, int [B, 2 · T], first the chosen text, then the rejected.
      rng: Key of dropout; None for none.
    """
    tokens = batch["tokens"]
    scores = model.scores(params, tokens.reshape(-1, tokens.shape[1] // 2), rng)
    return scores.astype(np.promote_types(scores.dtype, np.float32)).reshape(-1, 2)


def reward_loss(
    model: FineTunedModel, center: float, params: Any, batch: Mapping[str, Any], rng: Any
) -> tuple[jt.Loss, Any]:
    """Return the loss of Bradley and Terry of pairs, and the accuracy and the margin of their rewards.

    As in TRL there is no dropout.

    Args:
      model: The model.
      center: Factor of the squared sums of rewards.
      params: Its params.
      batch: As of `rewards`.
      rng: Not used.
    """
    del rng
    chosen, rejected = rewards(model, params, batch).T
    is_pair, margin = _weights(batch) > 0, chosen - rejected
    metrics = {
        "reward_accuracy": jt.Loss.of((margin > 0).astype(margin.dtype), is_pair),
        "reward_margin": jt.Loss.of(margin, is_pair),
    }
    return jt.Loss.of(losses.bradley_terry(chosen, rejected, center=center), is_pair), metrics


def classification_loss(model: FineTunedModel, params: Any, batch: Mapping[str, Any], rng: Any) -> tuple[jt.Loss, Any]:
    """Return the cross-entropy of the labels, and the accuracy.

    Args:
      model: The model.
      params: Its params.
      batch: `tokens`, int [B, T], and `label`, int [B].
      rng: Key of dropout; None in evaluation.
    """
    predictions = jt.Predictions(model.scores(params, batch["tokens"], rng), batch["label"], _weights(batch))
    return predictions.loss(), {"accuracy": predictions.accuracy()}


def _with_head(model: FineTunedModel, is_reward: bool) -> FineTunedModel:
    """Return a model whose head is trained beside its adapters, for rewards without dropout."""
    if model.config is None:
        return model
    config = replace(model.config, trained="score")
    return replace(model, config=replace(config, dropout=0.0) if is_reward else config)


def _weights(batch: Mapping[str, Any]) -> Any:
    return row_weights(batch, len(batch["tokens"]))


@dataclass(frozen=True, eq=False)
class _HeadRows:
    """Examples of a split as rows: preferences, or texts with one of `labels`."""

    files: ExampleFiles
    texts: ModelTokenizer
    length: int
    pad: int
    labels: tuple[str, ...]

    @cached_property
    def _rows(self) -> tuple[WholeTexts, WholeTextSummary]:
        if not self.labels:
            return reward_rows(encode_examples(self.files, self.texts), self.length, self.pad)
        numbers = label_numbers(self.files, self.labels)
        return labelled_rows(encode_labelled(self.files, self.texts), numbers, self.labels, self.length, self.pad)

    @property
    def rows(self) -> WholeTexts:
        return self._rows[0]

    @property
    def source(self) -> Source:
        """The rows; one of a preference has both texts one after the other."""
        return self.rows if self.labels else MappedSource(self.rows, _flat)

    @property
    def summary(self) -> list[str]:
        """What the rows hold of the examples, as sentences."""
        return self._rows[1].lines()

    def baselines(self) -> dict[str, str]:
        """Return the accuracy of the most frequent label."""
        counts = self._rows[1].labels
        name = max(counts, key=counts.__getitem__)
        return {"accuracy to be beaten": f"{counts[name] / len(self.rows):.3f} by the most frequent label, {name}"}

    def show(self) -> None:
        """Print the first examples, and the summary."""
        print_examples(self.rows, self.texts, labels=self.labels)
        print(*self.summary, sep="\n")


def _flat(pair: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.reshape(-1) for name, x in pair.items()}
