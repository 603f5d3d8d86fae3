"""Low-rank adapters of imported modules, beside `peft` on the same module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from safetensors.numpy import load_file

import jaxtrain as jt
from jaxtrain import losses, optim
from jaxtrain.models import load_adapters, lora, save_adapters
from jaxtrain.models.peft import torch_names

VOCABULARY, UPDATES = 31, 3
CONV1D, LINEAR = r".*\.(c_attn|c_proj)\.weight", r".*\.(query|value|dense)\.weight"


def gpt2() -> torch.nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, **rates)).double()


def bert() -> torch.nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, **rates, intermediate_size=12, max_position_embeddings=8)
    return transformers.BertForMaskedLM(config).double()


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, (2, 6))


def loss(outputs: Any, batch: Any) -> jt.Loss:
    return jt.Loss.of(losses.cross_entropy(outputs["logits"][:, :-1], batch["input_ids"][:, 1:]))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("module", "targets"), [(gpt2, CONV1D), (bert, LINEAR)])
def test_adapters_of_an_imported_module_train_as_in_peft(
    tmp_path: Path, module: Callable[[], torch.nn.Module], targets: str
) -> None:
    peft = pytest.importorskip("peft")
    module = module()
    with jax.enable_x64():
        model = jt.from_torch(module, {"input_ids": tokens(0)})
        config = model.lora_config(targets, r=3, alpha=5.0)
        draw = np.random.default_rng(0)
        adapters = jax.tree.map(
            # peft reads adapters in float32.
            lambda x: (0.3 * draw.standard_normal(x.shape)).astype(np.float32).astype(float),
            lora.init(jax.random.key(0), model.params, config),
        )
        save_adapters(tmp_path, adapters, config, model.names)
        theirs = peft.PeftModel.from_pretrained(module, tmp_path, is_trainable=True).double().train()
        adapted = lora.with_adapters(model.loss(loss), config)
        step = jt.train_step(adapted, optim.adamw(1e-2), precision="fp64", frozen=lora.frozen)
        state = step.init({"base": model.params, "lora": adapters})
        trained = {name.replace(".default", ""): p for name, p in theirs.named_parameters() if p.requires_grad}
        assert {*load_file(tmp_path / "adapter_model.safetensors")} == {*trained}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        names = torch_names(adapters, model.names)
        for i in range(UPDATES):
            ids = torch.tensor(tokens(i))
            optimizer.zero_grad()
            logits = theirs(input_ids=ids).logits[:, :-1]
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            expected.backward()
            optimizer.step()
            state, metrics = step(state, {"input_ids": tokens(i)})
            np.testing.assert_allclose(metrics["loss"], expected.item(), rtol=1e-12)
            moments = [optax.tree.get(state.opt_state, name)["lora"] for name in ("mu", "nu")]
            ours = [names.to_torch(tree) for tree in (*moments, state.params["lora"])]
            for name, param in trained.items():
                slots = (optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"], param.detach())
                for found, slot in zip(ours, slots, strict=True):
                    np.testing.assert_allclose(found[name], slot.numpy(), rtol=1e-8, atol=1e-13, err_msg=name)
        read, again = load_adapters(tmp_path, model.params, model.names)
        jax.tree.map(np.testing.assert_array_equal, read, adapters)
        assert {again.is_out_in(name) for name in model.params if name in read} == {targets == LINEAR}


class Network(torch.nn.Module):
    """Weights of linear layers, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convolution = torch.nn.Embedding(5, 4), torch.nn.Conv1d(4, 4, 3, padding=1)
        self.norms = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
        self.first, self.second, self.head = (torch.nn.Linear(4, n) for n in (4, 3, 5))
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution(self.embedding(x).mT).mT
        return self.second(self.norms(self.first(hidden))).sum() + self.head(hidden).sum()


def test_targets_of_an_imported_module_are_weights_of_linear_layers(tmp_path: Path) -> None:
    model = jt.from_torch(Network(), np.zeros((2, 3), int))
    config = model.lora_config("(first|second).weight", r=2, alpha=8, rslora=True)
    adapters = lora.init(jax.random.key(0), model.params, config)
    assert jax.tree.map(lambda x: x.shape, adapters["second.weight"]) == {"a": (4, 2), "b": (2, 3)}
    filled = jax.tree.map(lambda x: x + 0.5, adapters)
    merged = lora.merge(model.params, filled, config)
    half = filled["second.weight"]
    expected = model.params["second.weight"] + config.scale * (half["a"] @ half["b"]).T
    np.testing.assert_allclose(merged["second.weight"], expected, rtol=1e-6)
    x = np.ones((2, 3), int)
    unmerged = lora.with_adapters(lambda params, x: model(params, x)[0], config)
    np.testing.assert_allclose(unmerged({"base": model.params, "lora": filled}, x), model(merged, x)[0], rtol=1e-5)
    model.save(tmp_path / "saved")
    assert jt.load_imported(tmp_path / "saved").lora_config("second.weight").is_out_in("second.weight")
    for targets in ("embedding.weight", "convolution.weight", "norms.*", "second.*"):
        with pytest.raises(jt.UserError, match="is not the weight of a linear layer alone: exclude it"):
            model.lora_config(targets)
    with pytest.raises(jt.UserError, match=r"match no whole name: the model has first\.weight, second\.weight"):
        model.lora_config("third")
