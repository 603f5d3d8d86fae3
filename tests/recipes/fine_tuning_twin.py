"""A run of `FineTuneRecipe` in float64, and the same model in `transformers` with the same adapters in `peft`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import transformers

from jaxtrain.models import nf4
from jaxtrain.models.peft import torch_names
from jaxtrain.recipes.finetune import FineTuneRecipe
from jaxtrain.runner.recipe_step import training_step
from parity.oracle.in_jax import in_float64
from tests.data.finetuning.templates import byte_level, write_folder
from tests.models.programs import widened

LENGTH = 48
UPDATES, WARMUP, LR, BATCH, MICRO_BATCHES = 20, 4, 1e-2, 4, 2
RANK, ALPHA, BETA, CENTER, CLIP_NORM = 3, 7, 0.3, 0.05, 1.0
SIZES = {"initializer_range": 0.3, "vocab_size": byte_level().get_vocab_size()}


@dataclass(frozen=True)
class Record:
    """What 20 updates computed; gradients, parameters and moments by the names of `transformers` and `peft`.

    Attributes:
      losses: Loss of every update.
      norms: Norm of the gradient of every update before clipping.
      first: First moments after the first update, a tenth of its clipped gradient.
      params: Trained parameters at the end.
      mu: First moments at the end.
      nu: Second moments at the end.
    """

    losses: list[float]
    norms: list[float]
    first: dict[str, Any]
    params: dict[str, Any]
    mu: dict[str, Any]
    nu: dict[str, Any]


def write_model(folder: Path, family: str) -> Path:
    """Write a model without dropout, and a tokenizer whose chat template marks what the assistant writes."""
    write_folder(folder, "smollm", byte_level(), pad_token="<pad>")
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=64, **SIZES,
        )  # fmt: skip
    elif family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SIZES
        )
    else:
        config = imported_config(family)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def imported_config(family: str) -> Any:
    """Return the configuration of a model that is imported from `transformers`."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        **SIZES,
    }
    grouped = {**sizes, "num_key_value_heads": 1, "intermediate_size": 24, "pad_token_id": 0}
    if family == "opt":
        return transformers.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, init_std=0.3)
    if family == "gpt_neox":
        return transformers.GPTNeoXConfig(**sizes, intermediate_size=24)
    if family == "phi3":
        return transformers.Phi3Config(**grouped, sliding_window=5)
    if family == "gpt_oss":
        # The factor of YaRN would be rounded to float32 when the program is traced.
        rope = {"rope_type": "default", "rope_theta": 1e4}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_parameters": rope}
        return transformers.GptOssConfig(**grouped, **experts, sliding_window=5)
    if family == "Qwen3Moe":
        return transformers.Qwen3MoeConfig(**grouped, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    if family == "bloom":
        return transformers.BloomConfig(n_layer=2, n_head=2, hidden_dropout=0.0, hidden_size=16, **SIZES)
    # Gemma multiplies its embeddings.
    grouped["initializer_range"] = 0.1
    return getattr(transformers, f"{family}Config")(**grouped, head_dim=8, sliding_window=5)


def write_examples(root: Path) -> None:
    """Write conversations, preferences and labelled texts, enough for all updates, of several lengths."""
    conversations, pairs, labelled = [], [], []
    for i in range(2 * BATCH * UPDATES):
        turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}" * (1 + i % 3)}]
        conversations.append({"messages": [{"role": "system", "content": "<"}, *turns]})
        pairs.append({"prompt": f"{i}? ", "chosen": f"yes{i % 7}", "rejected": "no " * (1 + i % 4)})
        labelled.append({"text": f"{i}? " * (1 + i % 4) + "abc"[i % 3], "label": "cba"[i % 3]})
    kinds = {"supervised": conversations, "dpo": pairs, "reward": pairs, "classification": labelled}
    for name, rows in kinds.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Twin:
    """A fine-tuning and its twin.

    Args:
      root: Folder to write the model to; `write_examples` has written the examples there.
      family: "llama" or "gpt2".
      loss: Setting of the recipe, as the others.
      method: "lora", "dora" or "full".
      quantize: "none" or "nf4".
      packing: Whether rows hold several examples.
    """

    def __init__(
        self, root: Path, family: str, loss: str, method: str, *, quantize: str = "none", packing: bool = True
    ) -> None:
        self.folder, self.data = write_model(root / family, family), root / f"{loss}.jsonl"
        self.loss, self.is_dpo, self.is_full = loss, loss == "dpo", method == "full"
        self.settings = FineTuneRecipe(
            model=self.folder, data=self.data, validation=self.data, loss=loss, method=method, quantize=quantize,
            packing=packing, seq_len=LENGTH, batch_size=BATCH, accumulate=MICRO_BATCHES, steps=UPDATES, lr=LR,
            warmup_steps=WARMUP, clip_norm=CLIP_NORM, rank=RANK, alpha=ALPHA, lora_dropout=0, beta=BETA,
            center_rewards=CENTER, answers=None,
        )  # fmt: skip
        self.task = self.settings.task()
        self.names = self.task.loss_fn.args[0].decoder.weights.names
        model = self.task.loss_fn.args[0].decoder.weights.model  # an imported one has no config
        self.head = getattr(getattr(model, "config", None), "labels", None)
        self.pad = self.task.texts.special("pad")
        assert len(self.task.train) >= BATCH * UPDATES
        self.initial = self._initial(np.random.default_rng(0))
        trained = self.initial[self._trained] if self._trained else self.initial
        self.table = self.names if self.is_full else torch_names(trained, self.names)
        self.peft_settings = {
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": "all-linear",
            "use_dora": method == "dora",
            "task_type": "CAUSAL_LM" if self.head is None else "SEQ_CLS",
        }
        self.peft_settings["fan_in_fan_out"] = family == "gpt2"

    @property
    def _trained(self) -> str:
        if self.is_full:
            return "model" if self.is_dpo else ""
        return "lora"

    def _initial(self, rng: np.random.Generator) -> Any:
        """Return the initial params in float64, with adapters, or weights beside those of a reference, that differ."""
        params = widened(self.task.initial().params)
        if self._trained:
            noise = lambda x: x + 0.1 * rng.standard_normal(x.shape)  # noqa: E731
            params[self._trained] = jax.tree.map(noise, params[self._trained])
        return params

    def batches(self) -> list[dict[str, np.ndarray]]:
        """Return the batches of all updates, in the order of the examples."""
        rows = [self.task.train[i] for i in range(BATCH * UPDATES)]
        batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        return [{name: np.stack([row[name] for row in batch]) for name in batch[0]} for batch in batches]

    def train(self) -> Record:
        """Train by the recipe's own task and step."""
        losses, norms = [], []
        with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):  # NF4 has scales and tables in float32
            recipe = replace(self.settings, precision="fp64")  # no setting of a user
            step = training_step(recipe, replace(self.task, loss_fn=in_float64(self.task.loss_fn)))
            state = step.init(self.initial)
            for i, batch in enumerate(self.batches()):
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
                norms.append(float(metrics["grad_norm"]))
                if i == 0:
                    first = self._named(optax.tree.get(state.opt_state, "mu"))
            mu, nu = (self._named(optax.tree.get(state.opt_state, name)) for name in ("mu", "nu"))
            return Record(losses, norms, first, self._named(state.params), mu, nu)

    def _named(self, params: Any) -> dict[str, Any]:
        return self.table.to_torch(params[self._trained] if self._trained else params)

    def base_model(self) -> Any:
        """Return the model of `transformers` before the training, in float64; of NF4 the dequantized one."""
        if self.head is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(self.folder).double()
        else:
            settings = {"num_labels": len(self.head), "pad_token_id": self.pad}
            model = transformers.AutoModelForSequenceClassification.from_pretrained(self.folder, **settings).double()
        model.config._experts_implementation = "batched_mm"  # PyTorch's grouped products have no float64
        if self.settings.quantize == "nf4":
            with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
                base = jax.jit(in_float64(nf4.dequantize_params))(self.initial["base"])
                weights = {name: torch.tensor(np.asarray(x)) for name, x in self.names.to_torch(base).items()}
            model.load_state_dict(weights, strict=False)
        return model.eval()

    def adapted(self, model: Any) -> Any:
        """Return a model with adapters of `peft`; all weights are trained without."""
        peft = pytest.importorskip("peft")
        return model if self.is_full else peft.get_peft_model(model, peft.LoraConfig(**self.peft_settings))

    def load(self, model: Any) -> dict[str, Any]:
        """Write the initial values into a model; return its trained parameters by name."""
        model.double()
        trained = {saved_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        values = self._named(self.initial)
        assert trained.keys() == values.keys()
        for name, p in trained.items():
            p.data.copy_(torch.tensor(np.asarray(values[name])))
        return trained


def texts_of(batch: dict[str, np.ndarray]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens and the labels [N] of every text of packed rows."""
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            columns = batch["segments"][row] == segment
            tokens, targets, weight = (torch.tensor(batch[k][row, columns]) for k in ("tokens", "targets", "weight"))
            labels = torch.where(weight > 0, targets, -100)
            yield torch.cat([tokens[:1], targets]).long(), torch.cat([torch.tensor([-100]), labels]).long()


def saved_name(name: str) -> str:
    """Return the name of a parameter in an adapter folder."""
    name = name.replace(".modules_to_save.default", "")
    return name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


def moments(optimizer: torch.optim.Optimizer, trained: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a moment of every parameter, copied."""
    return {path: optimizer.state[p][name].clone() for path, p in trained.items()}


def assert_alike(ours: Record, theirs: Record) -> None:
    """Assert that the first loss and gradient are equal to 1e-10, and everything after 20 updates to 1e-8."""
    assert len(ours.losses) == len(theirs.losses) == UPDATES
    assert theirs.losses[0] - theirs.losses[-1] > 0.05, theirs.losses
    for found, expected in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert max(theirs.norms) > CLIP_NORM
    _assert_near(ours.first, theirs.first, 1e-10)
    for part in ("params", "mu", "nu"):
        _assert_near(getattr(ours, part), getattr(theirs, part), 1e-8)


def _assert_near(ours: dict[str, Any], theirs: dict[str, Any], bar: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        expected = x.detach().numpy()
        error = np.linalg.norm(ours[name] - expected) / np.linalg.norm(expected)
        assert error <= bar, f"{name}: {error:.2g}"
