"""Imported modules on meshes: five steps equal those of one device, in float64."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import jaxtrain as jt
from jaxtrain import losses, optim
from jaxtrain.distributed import make_mesh, shard
from tests.distributed.programs import distance
from tests.torch_import.families import GROUPED
from tests.torch_import.test_lora import VOCABULARY, gpt2, loss

ROWS, STEPS, NEAR = 8, 5, 1e-10
Batch = dict[str, np.ndarray]


class Model(NamedTuple):
    """A module in float64, its batches by seed, its loss, and some of its sharding rules."""

    module: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], jt.Loss]
    rules: dict[str, P]


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # BatchNorm cancels a bias before it, whose gradient is rounding alone.
        first, second = nn.Conv2d(2, 8, 3, bias=False), nn.Conv2d(8, 8, 3, stride=2)
        self.body = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Dropout(0.1))
        self.head = nn.Linear(8 * 2 * 2, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image).flatten(1))


def llama() -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GROUPED, **sizes, "intermediate_size": 12})
    return transformers.LlamaForCausalLM(config).double()


def tokens(seed: int) -> Batch:
    return {"input_ids": np.random.default_rng(seed).integers(3, VOCABULARY, (ROWS, 8))}


def images(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    return {"image": draw.standard_normal((ROWS, 2, 8, 8)), "label": draw.integers(0, 4, ROWS)}


def classified(logits: Any, batch: Any) -> jt.Loss:
    return jt.Loss.of(losses.cross_entropy(logits, batch["label"]))


COLUMNS, ROWS_OF = P(None, "tensor", "fsdp"), P(None, "fsdp", "tensor")  # of [layers, out, in]
LLAMA = {
    **{f"model.layers.*.self_attn.{x}_proj.weight": COLUMNS for x in "qkv"},
    **{f"model.layers.*.mlp.{x}_proj.weight": COLUMNS for x in ("gate", "up")},
    "model.layers.*.self_attn.o_proj.weight": ROWS_OF,
    "model.layers.*.mlp.down_proj.weight": ROWS_OF,
    "lm_head.weight": P("tensor", "fsdp"),
}
GPT2 = {
    # Conv1D stores [in, out].
    "transformer.h.*.attn.c_attn.weight": P(None, "fsdp", "tensor"),
    "transformer.h.*.attn.c_attn.bias": P(None, "tensor"),
    "transformer.h.*.mlp.c_proj.weight": P(None, "tensor", "fsdp"),
    "transformer.h.*.mlp.c_proj.bias": P(None, "fsdp"),
    "transformer.wte.weight": P("tensor", "fsdp"),
}
MODELS = {
    "gpt2": Model(gpt2, tokens, loss, GPT2),
    "llama": Model(llama, tokens, loss, LLAMA),
    "cnn": Model(lambda: CNN().double(), images, classified, {"body.3.weight": P(None, "fsdp", None, None)}),
}


def imported(name: str) -> jt.ImportedModel:
    example = MODELS[name].batch(0)
    example.pop("label", None)
    return jt.from_torch(MODELS[name].module(), example)


def trained(model: jt.ImportedModel, of: Model, mesh: str | None = None, rules: Any = None) -> tuple[Any, list[float]]:
    """Return the state and the losses after training, on one device or on a mesh."""
    # With a small eps AdamW would amplify the rounding of gradients that are 0, such as those of keys' biases.
    step = jt.train_step(
        model.loss(of.loss), optim.adamw(1e-2, eps=1e-4), precision="fp64", accumulate=2, clip_norm=1.0
    )
    if mesh is not None:
        count = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
        step = shard(step, make_mesh(mesh, jax.devices()[:count]), rules)
    state, found = step.init(jax.device_get(model.params), model_state=jax.device_get(model.state)), []
    for i in range(STEPS):
        state, metrics = step(state, of.batch(i))
        found.append(float(metrics["loss"]))
    return state, found


MESHES = ("data=2", "fsdp=4", "data=2,fsdp=2", "tensor=2", "fsdp=2,tensor=2", "sequence=2")
CASES = [(name, mesh) for name in MODELS for mesh in MESHES if name != "cnn" or "sequence" not in mesh]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_training_on_a_mesh_equals_that_on_one_device(name: str, mesh: str) -> None:
    with jax.enable_x64():
        model = imported(name)
        expected_rules = {re.escape(name): spec for name, spec in MODELS[name].rules.items()}
        assert expected_rules.items() <= model.sharding.items()
        rules = model.sharding if "tensor" in mesh or mesh == "data=2,fsdp=2" else None
        (alone, expected), (state, found) = trained(model, MODELS[name]), trained(model, MODELS[name], mesh, rules)
        assert distance(alone.params, state.params) < NEAR
        assert distance(alone.opt_state, state.opt_state) < NEAR
        assert alone.model_state is None or distance(alone.model_state, state.model_state) < NEAR
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        if (name, mesh) == ("gpt2", "fsdp=2,tensor=2"):
            kernel = state.params["transformer.h.*.mlp.c_fc.weight"]
            assert kernel.addressable_shards[0].data.size * 4 == kernel.size
