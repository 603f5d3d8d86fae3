"""The data code of a PyTorch script as it is: a tokenizer, Dataset, collate function and DataLoader.

`jt.fit` on the DataLoader has the losses of the script's own loop.
"""

import signal
from dataclasses import dataclass
from itertools import islice

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

import jaxtrain as jt
from jaxtrain.data.reading.torch_loader import RandomStates

STEPS, BATCH_SIZE, LR, CLASSES = 10, 4, 0.5, 2

# As in the script:
WORDS = ["the", "film", "plot", "was", "is", "good", "great", "fine", "bad", "poor", "dull", "and", "but", "very"]


def make_texts(count, seed):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in range(count)]
    return texts, [sum(text.split().count(word) for word in ("good", "great", "fine")) % CLASSES for text in texts]


def make_tokenizer():
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")


class Reviews(Dataset):
    def __init__(self, count, seed, tokenizer):
        self.texts, self.labels = make_texts(count, seed)
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        encoding = self.tokenizer(self.texts[index], truncation=True, max_length=8)
        return {**encoding, "label": self.labels[index]}


def make_loader(count=18, seed=0, order="sampler", **padding):
    tokenizer = make_tokenizer()
    dataset = Reviews(count, seed, tokenizer)
    collate = DataCollatorWithPadding(tokenizer, **padding)
    options = {
        "sampler": {"sampler": DistributedSampler(dataset, num_replicas=1, rank=0, seed=5), "drop_last": True},
        "shuffle": {"shuffle": True},  # the last batch has two texts
        "sequential": {},
    }
    return DataLoader(dataset, BATCH_SIZE, collate_fn=collate, **options[order])


class Classifier(torch.nn.Module):
    """The mean of the tokens' embeddings, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(len(WORDS) + 2, 8)
        self.linear = torch.nn.Linear(8, CLASSES)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return self.linear((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))


def make_model():
    torch.manual_seed(0)
    return Classifier()


def epochs(loader, seed):
    """Yield the batches of epoch after epoch."""
    for epoch in range(STEPS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        # What `training_batches` documents: the order of shuffle=True depends on the seed and the epoch.
        states = RandomStates(loader)
        states.seed(seed, epoch)
        with states:
            yield from list(loader)


def losses_of_the_script(loader, seed):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for batch in islice(epochs(loader, seed), STEPS):
        optimizer.zero_grad()
        labels = batch.pop("labels")
        batch.pop("token_type_ids", None)
        loss = functional.cross_entropy(model(**batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True, kw_only=True)
class Sentiment(jt.Recipe):
    """The script's classifier on its own DataLoader."""

    order: str = "sampler"
    pad_to: int = 8
    """Length to pad to; 0 pads to the longest text of a batch."""
    steps: int = STEPS
    batch_size: int = BATCH_SIZE
    lr: float = LR
    clip_norm: float | None = None
    log_every: int = 1
    eval_every: int = 5
    save_every: int = 4
    seed: int = 3

    def task(self):
        padding = {"padding": "max_length", "max_length": self.pad_to} if self.pad_to else {}

        def init():
            tensors = {name: jnp.asarray(tensor.numpy()) for name, tensor in make_model().state_dict().items()}
            return {**tensors, "linear.weight": tensors["linear.weight"].T}

        def loss_fn(params, batch, rng):
            mask = batch["attention_mask"][..., None].astype(jnp.float32)
            mean = (params["embedding.weight"][batch["input_ids"]] * mask).sum(1) / mask.sum(1)
            logits = mean @ params["linear.weight"] + params["linear.bias"]
            return jt.Loss.of(jt.losses.cross_entropy(logits, batch["labels"])), {}

        return jt.Task(
            init=init,
            loss_fn=loss_fn,
            train=make_loader(order=self.order, **padding),
            validation=make_loader(6, 1, "sequential", padding="max_length", max_length=8),
        )

    def make_optimizer(self):
        return jt.optim.sgd(self.lr)


def losses(run):
    return [line["loss"] for line in run.history if "loss" in line]


@pytest.mark.parametrize("order", ["sampler", "shuffle"])
def test_fit_has_the_losses_of_the_script(order, tmp_path):
    expected = losses_of_the_script(make_loader(order=order, padding="max_length", max_length=8), seed=3)
    done = jt.fit(Sentiment(order=order), tmp_path / "run", quiet=True)
    np.testing.assert_allclose(losses(done), expected, rtol=1e-5)
    assert len(set(expected)) == STEPS


def test_a_resumed_fit_has_the_losses_of_the_script(tmp_path):
    def interrupt(step, metrics, state):
        if step == 6:
            signal.raise_signal(signal.SIGINT)

    expected = losses_of_the_script(make_loader(padding="max_length", max_length=8), seed=3)
    assert jt.fit(Sentiment(), tmp_path / "run", quiet=True, on_step=interrupt).exit_status == 130
    done = jt.fit(Sentiment(), tmp_path / "run", quiet=True, resume=True)
    np.testing.assert_allclose(losses(done), expected, rtol=1e-5)


def test_batches_padded_to_their_longest_text_are_allowed_to_recompile(tmp_path):
    expected = losses_of_the_script(make_loader(), seed=3)
    with pytest.raises(jt.UserError, match="allow_recompile"):
        jt.fit(Sentiment(pad_to=0), tmp_path / "refused", quiet=True)
    done = jt.fit(Sentiment(pad_to=0, allow_recompile=5), tmp_path / "run", quiet=True)
    np.testing.assert_allclose(losses(done), expected, rtol=1e-5)


def test_the_validation_loader_is_evaluated_to_its_last_text(tmp_path):
    done = jt.fit(Sentiment(steps=1), tmp_path / "run", quiet=True)
    (batch,) = DataLoader(Reviews(6, 1, make_tokenizer()), 6, collate_fn=DataCollatorWithPadding(make_tokenizer()))
    with torch.no_grad():
        logits = make_model()(batch["input_ids"], batch["attention_mask"])
    expected = functional.cross_entropy(logits, batch["labels"]).item()
    assert done.history[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)
