"""Twenty updates of fine-tuning beside `transformers` and `peft` with the formulas of TRL, in float64."""

import copy

import pytest
import torch
import transformers
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from parity.oracle.in_torch import InFloat64
from tests.recipes.fine_tuning_twin import (
    BETA,
    CENTER,
    CLIP_NORM,
    LENGTH,
    LR,
    UPDATES,
    WARMUP,
    Record,
    Twin,
    assert_alike,
    moments,
    texts_of,
    write_examples,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("updates")
    write_examples(root)
    return root


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "loss", "method", "quantize"),
    [
        ("llama", "supervised", "lora", "nf4"),
        ("gpt2", "supervised", "full", "none"),
        ("llama", "dpo", "dora", "none"),
        ("gpt2", "reward", "lora", "none"),
        ("gpt2", "supervised", "dora", "none"),
        ("gpt2", "dpo", "lora", "none"),
        ("llama", "dpo", "full", "none"),
        ("llama", "classification", "lora", "none"),
        ("llama", "reward", "full", "none"),
        ("gpt2", "classification", "full", "none"),
    ],
)
def test_twenty_updates_are_those_of_transformers_and_peft(root, monkeypatch, family, loss, method, quantize):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    twin = Twin(root, family, loss, method, quantize=quantize)
    assert_alike(twin.train(), trained_by_torch(twin))


def trained_by_torch(twin):
    base = twin.base_model()
    reference = copy.deepcopy(base) if twin.is_full else base
    model = twin.adapted(base)
    trained = twin.load(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0)  # betas (0.9, 0.999)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, UPDATES)
    losses, norms = [], []
    for batch in twin.batches():
        optimizer.zero_grad()
        with InFloat64():
            loss = LOSSES[twin.loss](twin, model, reference, batch)
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP_NORM).item())
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) == 1:
            first = moments(optimizer, trained, "exp_avg")
    mu, nu = (moments(optimizer, trained, name) for name in ("exp_avg", "exp_avg_sq"))
    return Record(losses, norms, first, trained, mu, nu)


def supervised(twin, model, reference, batch):
    """Return the loss of SFTTrainer: the mean cross-entropy over the labels of all texts, each in its own row."""
    texts = zip(*texts_of(batch), strict=True)
    tokens, labels = (
        pad_sequence(x, batch_first=True, padding_value=pad) for x, pad in zip(texts, (0, -100), strict=True)
    )
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def preferences(twin, model, reference, batch):
    """Return the loss of DPOTrainer; the reference is the model without adapters."""
    tokens, targets, weight = (torch.tensor(batch[k].reshape(-1, LENGTH)) for k in ("tokens", "targets", "weight"))

    def answers(model):
        logits = model(tokens.long(), use_cache=False).logits
        return (torch.gather(logits.log_softmax(-1), 2, targets.long()[..., None])[..., 0] * weight).sum(1)

    if twin.is_full:
        with torch.no_grad():
            before = answers(reference)
    else:
        with torch.no_grad(), model.disable_adapter():
            before = answers(model)
    ratios = (answers(model) - before).reshape(-1, 2)
    return -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()


def rewards(twin, model, reference, batch):
    """Return the loss of RewardTrainer."""
    tokens = torch.tensor(batch["tokens"])
    chosen, rejected = model(tokens.reshape(-1, tokens.shape[1] // 2), use_cache=False).logits.reshape(-1, 2).T
    return -F.logsigmoid(chosen - rejected).mean() + CENTER * ((chosen + rejected) ** 2).mean()


def labels(twin, model, reference, batch):
    """Return the loss that `transformers` computes from labels."""
    return model(torch.tensor(batch["tokens"]), labels=torch.tensor(batch["label"]).long(), use_cache=False).loss


LOSSES = {"supervised": supervised, "dpo": preferences, "reward": rewards, "classification": labels}
