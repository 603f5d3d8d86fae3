"""The workloads: parity cases at sizes that are worth timing."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parity.case import Case


@dataclass(frozen=True)
class Workload:
    """A parity case with its sizes.

    Attributes:
      make: Creates the case from sizes given by keyword.
      sizes: The sizes that are timed; a job may override some.
      unit: What throughput counts.
      images: Whether PyTorch runs fastest in its channels-last layout.
      check_sizes: Overrides of `sizes` in the float64 equality check.
      model: Name of the model's module in `jaxtrain.models`, which has its sharding rules.
    """

    make: Callable[..., Case]
    sizes: Mapping[str, int]
    unit: str
    images: bool = False
    check_sizes: Mapping[str, int] = field(default_factory=dict)
    model: str = field(kw_only=True)

    def case(self, sizes: Mapping[str, int]) -> Case:
        """Return the case at the workload's sizes, overridden by `sizes`."""
        return self.make(**{**self.sizes, **sizes})

    def sharding(self) -> Mapping[str, Any]:
        """Return the sharding rules of the model's parameters."""
        rules: Mapping[str, Any] = importlib.import_module(f"jaxtrain.models.{self.model}").SHARDING
        return rules

    def units_per_step(self, sizes: Mapping[str, int]) -> int:
        """Return the number of units in one step."""
        resolved = {**self.sizes, **sizes}
        return resolved["rows"] * resolved.get("length", 1)


def _gpt2(vocab_size: int, width: int, depth: int, heads: int, rows: int, length: int) -> Case:
    from jaxtrain.models import GPT2Config
    from parity.cases.built_in import gpt2_case

    config = GPT2Config(vocab_size=vocab_size, n_positions=length, n_embd=width, n_layer=depth, n_head=heads)
    return gpt2_case.case(config, reference=config, rows=rows, tokens=length + 1)


def _mlp(rows: int, side: int = 28, hidden: int = 512) -> Case:
    from parity.cases.built_in import mlp_case

    return replace(mlp_case.case(side=side, hidden=hidden), rows=rows)


def _llama(
    vocab_size: int, width: int, hidden: int, depth: int, heads: int, keys: int, rows: int, length: int, tied: int = 0
) -> Case:
    from jaxtrain.models import LlamaConfig
    from parity.cases.built_in import llama_case

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=width // heads,
        max_position_embeddings=length,
        tie_word_embeddings=bool(tied),
    )
    return llama_case.sized("llama", config, packed=True, clip_norm=1.0, rows=rows, tokens=length)


def _bert(vocab_size: int, width: int, depth: int, heads: int, rows: int, length: int) -> Case:
    from jaxtrain.models import BertConfig
    from parity.cases.built_in import bert_case

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
    )
    return bert_case.sized(config, rows)


def _t5(vocab_size: int, width: int, hidden: int, depth: int, heads: int, rows: int, length: int, target: int) -> Case:
    from jaxtrain.models import T5Config
    from parity.cases.built_in import t5_case

    config = T5Config(
        vocab_size=vocab_size,
        d_model=width,
        d_kv=width // heads,
        d_ff=hidden,
        num_layers=depth,
        num_decoder_layers=depth,
        num_heads=heads,
    )
    return t5_case.case(config, rows=rows, source=length, target=target)


def _resnet(depth: int, side: int, rows: int) -> Case:
    from jaxtrain.models import RESNET_18, RESNET_50
    from parity.cases.built_in import resnet_case

    return resnet_case.sized(f"resnet{depth}", {18: RESNET_18, 50: RESNET_50}[depth], side, clip_norm=1.0, rows=rows)


def _vit(side: int, patch: int, width: int, depth: int, heads: int, rows: int) -> Case:
    from jaxtrain.models import ViTConfig
    from parity.cases.built_in import vit_case

    config = ViTConfig(
        image_size=(side, side),
        patch_size=patch,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=1000,
    )
    return vit_case.sized(config, rows)


TINY = {"vocab_size": 256, "width": 128, "depth": 4, "heads": 4, "rows": 12, "length": 64}
# The vocabulary of 50257 is padded to a multiple of 128, on both sides.
SMALL = {"vocab_size": 50304, "width": 768, "depth": 12, "heads": 12, "rows": 16, "length": 1024}
LLAMA = {**SMALL, "vocab_size": 32000, "hidden": 3072, "keys": 4}
# Llama 3.2 1B, with rows that PyTorch has memory for beside JAX.
LLAMA_1B = {
    **{"vocab_size": 128256, "width": 2048, "hidden": 8192, "depth": 16, "heads": 32, "keys": 8, "tied": 1},
    **{"rows": 4, "length": 2048},
}
SMALL_CHECK = {"depth": 2, "rows": 2, "length": 64}
WORKLOADS = {
    "gpt2-tiny": Workload(_gpt2, TINY, "tokens", check_sizes={"depth": 2, "rows": 4}, model="gpt2"),
    "gpt2-124m": Workload(_gpt2, SMALL, "tokens", check_sizes=SMALL_CHECK, model="gpt2"),
    "llama-160m": Workload(_llama, LLAMA, "tokens", check_sizes=SMALL_CHECK, model="llama"),
    "llama-1b": Workload(
        _llama,
        LLAMA_1B,
        "tokens",
        check_sizes={**SMALL_CHECK, "vocab_size": 512, "width": 256, "hidden": 512, "heads": 4, "keys": 1},
        model="llama",
    ),
    "bert-base": Workload(
        _bert,
        {**SMALL, "vocab_size": 30522, "rows": 32, "length": 512},
        "tokens",
        check_sizes=SMALL_CHECK,
        model="bert",
    ),
    "t5-small": Workload(
        _t5,
        {
            **{"vocab_size": 32128, "width": 512, "hidden": 2048, "depth": 6, "heads": 8},
            **{"rows": 64, "length": 512, "target": 128},
        },
        "source tokens",
        check_sizes={**SMALL_CHECK, "target": 16},
        model="t5",
    ),
    "resnet18": Workload(
        _resnet, {"depth": 18, "side": 64, "rows": 16}, "images", images=True, check_sizes={"rows": 4}, model="resnet"
    ),
    "resnet50": Workload(
        _resnet,
        {"depth": 50, "side": 224, "rows": 128},
        "images",
        images=True,
        check_sizes={"side": 64, "rows": 4},
        model="resnet",
    ),
    "vit-s": Workload(
        _vit,
        {"side": 224, "patch": 16, "width": 384, "depth": 12, "heads": 6, "rows": 128},
        "images",
        check_sizes={"depth": 2, "rows": 2},
        model="vit",
    ),
    "mlp-launch-bound": Workload(_mlp, {"rows": 16}, "examples", model="mlp"),
    "mlp-host": Workload(_mlp, {"rows": 1, "side": 2, "hidden": 4}, "examples", model="mlp"),
}
