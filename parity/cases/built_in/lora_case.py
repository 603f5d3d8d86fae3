"""Low-rank adapters on GPT-2, against the module with which `peft` replaces a linear layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import torch
from torch import Tensor
from torch.nn import Dropout, Linear, Module

from jaxtrain.models import LoraConfig, lora, peft
from parity.case import Case
from parity.cases.built_in import gpt2_case

CONFIG = replace(gpt2_case.CONFIG, n_embd=16)
ADAPTERS = LoraConfig(r"blocks/(qkv|attn_proj|fc|mlp_proj)/kernel", r=3, alpha=6)
ADAPTED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def case(adapters: LoraConfig = ADAPTERS, *, dropout: float | None = None, rows: int = 16) -> Case:
    """Return GPT-2's case with only the adapters trained; `dropout`, if given, is the rate of model and adapters."""
    config = CONFIG
    if dropout is not None:
        config, adapters = replace(config, dropout=dropout), replace(adapters, dropout=dropout)
    whole = gpt2_case.case(config, reference=config, rows=rows)
    names, _ = whole.tables
    base = names.to_jax({name: x.numpy() for name, x in _pretrained(whole).state_dict().items()}, whole.params_like)
    with_adapters = lora.with_adapters(whole.loss_fn, adapters)
    params_like = jax.eval_shape(lambda: lora.init(jax.random.key(0), base, adapters))

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        model_rng, adapters_rng = jax.random.split(rng)
        dtype = jax.tree.leaves(params)[0].dtype
        both = {"base": jax.tree.map(lambda x: x.astype(dtype), base), "lora": params}
        return with_adapters(both, batch, model_rng, rng=adapters_rng)

    def torch_loss(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return whole.torch_loss(model.base_model.model, batch)

    return replace(
        whole,
        name="lora",
        torch_model=lambda: _torch_model(whole, adapters),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=peft.torch_names(params_like, names),
        clip_norm=0.09,
    )


class _Adapted(Module):
    """`peft.tuners.lora.Linear`, around transformers' Conv1D."""

    def __init__(self, base: Any, config: LoraConfig) -> None:
        super().__init__()
        n, m = base.weight.shape
        self.base_layer, self.dropout = base, Dropout(config.dropout)
        self.scale = config.alpha / config.r
        self.lora_A, self.lora_B = Linear(n, config.r, bias=False), Linear(config.r, m, bias=False)
        # With the usual initial zeros, A would have no gradient.
        torch.nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scale


def _torch_model(whole: Case, adapters: LoraConfig) -> Any:
    """The model under the names of a file of adapters, with only these as parameters."""
    model = _pretrained(whole)
    for module in model.modules():
        for name, weight in [*module._parameters.items()]:
            if weight is not None:
                del module._parameters[name]
                module.register_buffer(name, weight.detach(), persistent=False)
    for block in model.transformer.h:
        for path in ADAPTED:
            parent, _, child = path.rpartition(".")
            setattr(block.get_submodule(parent), child, _Adapted(block.get_submodule(path), adapters))
    outer: Any = Module()
    outer.base_model = Module()
    outer.base_model.model = model
    return outer


def _pretrained(whole: Case) -> Any:
    """The model with fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return whole.torch_model()
