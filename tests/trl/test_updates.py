"""Twenty updates of TRL's own trainers, which read the examples themselves, beside those of the recipe, in float64."""

import importlib.util

import pytest
import torch

from parity.oracle.in_torch import InFloat64
from tests.recipes.fine_tuning_twin import (
    BATCH,
    BETA,
    CENTER,
    CLIP_NORM,
    LENGTH,
    LR,
    MICRO_BATCHES,
    UPDATES,
    WARMUP,
    Record,
    Twin,
    assert_alike,
    moments,
    texts_of,
    write_examples,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs tests/trl/requirements.txt"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trl")
    write_examples(root)
    return root


@pytest.mark.parametrize(
    ("family", "loss", "method", "packing"),
    [
        ("llama", "supervised", "lora", True),
        ("gpt2", "dpo", "lora", False),
        pytest.param("gpt2", "supervised", "dora", False, marks=pytest.mark.nightly),
        pytest.param("llama", "supervised", "full", False, marks=pytest.mark.nightly),
        pytest.param("llama", "dpo", "dora", False, marks=pytest.mark.nightly),
        pytest.param("llama", "dpo", "full", False, marks=pytest.mark.nightly),
        pytest.param("llama", "reward", "lora", False, marks=pytest.mark.nightly),
    ],
)
def test_twenty_updates_are_those_of_trl(root, tmp_path, monkeypatch, family, loss, method, packing):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    twin = Twin(root, family, loss, method, packing=packing)
    theirs = trained_by_trl(twin, tmp_path / "trl")
    assert_alike(twin.train(), theirs)


def trained_by_trl(twin, folder):
    import peft
    import transformers
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(twin.folder)
    settings = {
        "output_dir": str(folder), "max_steps": UPDATES, "per_device_train_batch_size": BATCH // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": LR, "lr_scheduler_type": "linear",
        "warmup_steps": WARMUP, "max_grad_norm": CLIP_NORM, "max_length": LENGTH + 1, "gradient_checkpointing": False,
        "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    }  # fmt: skip
    model, config = twin.base_model(), None if twin.is_full else peft.LoraConfig(**twin.peft_settings)
    data = dataset(twin)
    if twin.is_dpo:
        reference = twin.base_model() if twin.is_full else None
        trainer = recording(trl.DPOTrainer)(
            model, reference, trl.DPOConfig(beta=BETA, **settings), train_dataset=data, processing_class=tokenizer,
            peft_config=config,
        )  # fmt: skip
    elif twin.loss == "reward":
        settings |= {"center_rewards_coefficient": CENTER, "max_length": LENGTH}
        trainer = recording(trl.RewardTrainer)(
            model, trl.RewardConfig(**settings), train_dataset=data, processing_class=tokenizer, peft_config=config
        )
    else:
        packing = twin.settings.packing
        settings |= {"assistant_only_loss": not packing, "packing": packing, "shuffle_dataset": False}
        settings["dataset_kwargs"] = {"skip_prepare_dataset": packing}
        trainer = recording(trl.SFTTrainer)(
            model, trl.SFTConfig(**settings), train_dataset=data, processing_class=tokenizer,
            peft_config=config,
        )  # fmt: skip
    trainer.trained = twin.load(trainer.model)
    with InFloat64():
        trainer.train()
    mu, nu = (moments(trainer.optimizer, trainer.trained, name) for name in ("exp_avg", "exp_avg_sq"))
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return Record(trainer.losses, norms, trainer.first, trainer.trained, mu, nu)


def recording(trainer):
    """Return a trainer that reads its data in their order, and records losses and its first moments."""

    class Recording(trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.losses = [0.0] * UPDATES

        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses[self.state.global_step] += loss.item()
            return loss

        def create_optimizer(self, *args, **kwargs):
            optimizer = super().create_optimizer(*args, **kwargs)
            optimizer.register_step_post_hook(lambda *_: self.after_step(optimizer))
            return optimizer

        def after_step(self, optimizer):
            if self.state.global_step == 0:
                self.first = moments(optimizer, self.trained, "exp_avg")

    return Recording


def dataset(twin):
    """Return the examples as TRL's users pass them, or for packing, its packed rows with the same texts as ours."""
    import datasets

    if not twin.settings.packing or twin.loss != "supervised":
        return datasets.load_dataset("json", data_files=str(twin.data), split="train")
    rows = [{k: x[i : i + 1] for k, x in batch.items()} for batch in twin.batches() for i in range(BATCH)]
    return datasets.Dataset.from_list([packed([*texts_of(row)]) for row in rows])


def packed(texts):
    """Return texts as a row that TRL has packed."""
    tokens, labels = (torch.cat(parts).tolist() for parts in zip(*texts, strict=True))
    return {"input_ids": tokens, "labels": labels, "seq_lengths": [len(tokens) for tokens, _ in texts]}
