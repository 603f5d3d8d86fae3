"""Fine-tuning of a language model with a head on its last token: a reward model, or a classifier of texts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.data.finetuning import ExampleFiles, label_names, parse_example, parse_labelled
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
from jaxtrain.recipes.finetuning.example_rows import HeadRows
from jaxtrain.recipes.finetuning.finetuning_settings import FineTuneSettings
from jaxtrain.recipes.finetuning.head_losses import classification_loss, reward_loss, rewards, weights
from jaxtrain.recipes.finetuning.pretrained_decoder import Decoder, check_decoder
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel
from jaxtrain.recipes.finetuning.zoo_decoder import ZooDecoder
from jaxtrain.run import Input, Signature


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
    train, validation = (HeadRows(x, texts, settings.seq_len, pad, () if is_reward else labels) for x in files)
    model = _with_head(fine_tuned(ZooDecoder(pretrained)), is_reward)

    def predict(params: Any, batch: Any, model_state: Any) -> Any:
        del model_state
        if is_reward:
            return rewards(model, params, batch)
        return jt.Predictions(model.scores(params, batch["tokens"], None), batch["label"], weights(batch))

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


def _with_head(model: FineTunedModel, is_reward: bool) -> FineTunedModel:
    """Return a model whose head is trained beside its adapters, for rewards without dropout."""
    if model.config is None:
        return model
    config = replace(model.config, trained="score")
    return replace(model, config=replace(config, dropout=0.0) if is_reward else config)
