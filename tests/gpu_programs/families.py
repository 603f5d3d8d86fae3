"""Small training steps of every family, in shapes that cuDNN computes, to compile for GPUs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtrain
from jaxtrain.cost import GpuProgram
from jaxtrain.losses import cross_entropy, label_weights
from jaxtrain.models import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    ResNet,
    ResNetConfig,
    T5Config,
    ViT,
    ViTConfig,
    bert,
    functional,
    functional_with_state,
    gpt2,
    llama,
    lora,
    mixtral,
    resnet,
    t5,
    vit,
)
from jaxtrain.optim import adamw
from jaxtrain.planning import gpu_program

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, ROWS, EXPERTS = 2, 256, 8, 512, 128, 32, 4


class Family(NamedTuple):
    """A model with its loss.

    Attributes:
      loss_fn: The loss.
      params: Shapes of the parameters.
      batch: Shapes of a batch.
      rules: Sharding rules.
      attentions: Number of attentions in a forward pass.
      model_state: Shapes of the model state.
      options: Further options of `train_step`.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    rules: Any
    attentions: int
    model_state: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a program is compiled with."""

    family: str
    precision: str = "bf16"
    accumulate: int = 1
    remat: str = "none"
    unroll: bool = False
    mesh: str | None = None
    reshard_after: str = "forward"

    @property
    def name(self) -> str:
        """Name of the program, and of its file in figures/."""
        parts = [self.family, self.precision]
        parts += [f"k{self.accumulate}"] if self.accumulate > 1 else []
        parts += [f"remat-{self.remat}"] if self.remat != "none" else []
        parts += ["unrolled"] if self.unroll else []
        parts += [self.mesh.replace("=", "").replace(",", "-")] if self.mesh else []
        parts += [self.reshard_after] if self.reshard_after != "forward" else []
        return ".".join(parts)


def program(settings: Settings) -> GpuProgram:
    """Compile the step of a family for H100s."""
    family = FAMILIES[settings.family]()
    step = jaxtrain.train_step(
        family.loss_fn,
        adamw(1e-3, eps=1e-5, weight_decay=0.1),
        precision=settings.precision,
        accumulate=settings.accumulate,
        clip_norm=1.0,
        remat=settings.remat,
        unroll=settings.unroll,
        reshard_after=settings.reshard_after,
        **family.options,
    )
    return gpu_program(
        step, family.params, family.batch, mesh=settings.mesh, rules=family.rules, model_state=family.model_state
    )


def _shape(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _shapes(make: Callable[[], nnx.Module]) -> tuple[Callable[..., Any], Any]:
    return functional(nnx.eval_shape(make))


def _mean(logits: jax.Array, labels: jax.Array) -> jaxtrain.Loss:
    losses = cross_entropy(logits, labels)
    return jaxtrain.Loss(losses.sum(), label_weights(labels).sum())


def _gpt2() -> Family:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    apply, params = _shapes(lambda: GPT2(config, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, rng):
        logits = apply(params, batch["tokens"][:, :-1], rng)
        return _mean(logits, batch["tokens"][:, 1:]), {}

    return Family(loss_fn, params, {"tokens": _shape(ROWS, LENGTH + 1)}, gpt2.SHARDING, LAYERS)


def _decoder(config: LlamaConfig | MixtralConfig, model: Any, rules: Any) -> Family:
    apply, params = _shapes(lambda: model(config, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, rng):
        out = apply(params, batch["tokens"], rng, batch["positions"], batch["segments"])
        logits = out[0] if isinstance(out, tuple) else out
        return _mean(logits, batch["labels"]), {}

    names = ("tokens", "positions", "segments", "labels")
    return Family(loss_fn, params, {name: _shape(ROWS, LENGTH) for name in names}, rules, LAYERS)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": LENGTH,
}


def _bert() -> Family:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
    )
    apply, params = _shapes(lambda: Bert(config, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, rng):
        return _mean(apply(params, batch["token"], batch["mask"], batch["type"], rng), batch["label"]), {}

    batch = {name: _shape(ROWS, LENGTH) for name in ("token", "type", "label")}
    return Family(loss_fn, params, {**batch, "mask": _shape(ROWS, LENGTH, dtype=bool)}, bert.SHARDING, LAYERS)


def _t5() -> Family:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=HEADS,
        dropout=0.0,
    )
    apply, params = _shapes(lambda: T5(config, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, rng):
        decoder_tokens = jnp.pad(batch["labels"][:, :-1], ((0, 0), (1, 0)))
        return _mean(
            apply(params, batch["tokens"], decoder_tokens, batch["tokens"] != 0, None, rng), batch["labels"]
        ), {}

    batch = {name: _shape(ROWS, LENGTH) for name in ("tokens", "labels")}
    # That of the encoder, and two in the decoder.
    return Family(loss_fn, params, batch, t5.SHARDING, 3 * LAYERS)


def _vit() -> Family:
    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        num_labels=16,
    )
    apply, params = _shapes(lambda: ViT(config, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, rng):
        return _mean(apply(params, batch["image"], rng), batch["label"]), {}

    batch = {"image": _shape(ROWS, 64, 64, 3, dtype=np.float32), "label": _shape(ROWS)}
    return Family(loss_fn, params, batch, vit.SHARDING, LAYERS)


def _resnet() -> Family:
    config = ResNetConfig(hidden_sizes=(256, 512), depths=(1, 1), num_labels=16)
    apply, params, state = functional_with_state(nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))))

    def loss_fn(params, batch, rng, model_state):
        logits, model_state = apply(params, model_state, batch["image"], rng is not None)
        return _mean(logits, batch["label"]), {}, model_state

    batch = {"image": _shape(ROWS, 64, 64, 3, dtype=np.float32), "label": _shape(ROWS)}
    return Family(loss_fn, params, batch, resnet.SHARDING, 0, state)


def _lora() -> Family:
    whole = FAMILIES["gpt2"]()
    adapters = lora.LoraConfig(".*(qkv|fc)/kernel", r=8)
    params = {
        "base": whole.params,
        "lora": jax.eval_shape(lambda: lora.init(jax.random.key(0), whole.params, adapters)),
    }
    apply = lora.with_adapters(whole.loss_fn, adapters)

    def loss_fn(params, batch, rng):
        return apply(params, batch, rng)

    return whole._replace(
        loss_fn=loss_fn, params=params, rules=lora.sharding(gpt2.SHARDING), options={"frozen": lora.frozen}
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    "gpt2": _gpt2,
    "llama": lambda: _decoder(LlamaConfig(**SIZES), Llama, llama.SHARDING),
    "mixtral": lambda: _decoder(MixtralConfig(**SIZES, num_local_experts=EXPERTS), Mixtral, mixtral.SHARDING),
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
    "lora": _lora,
}
