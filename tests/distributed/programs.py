"""Small training runs of every model family, on one device and on a mesh."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.distributed import shard
from jaxtrain.losses import cross_entropy
from jaxtrain.models import (
    bert,
    cnn,
    functional,
    functional_with_state,
    gpt2,
    llama,
    lora,
    mixtral,
    mlp,
    resnet,
    t5,
    vit,
)
from jaxtrain.models.batch_norm import set_batch_norm_groups
from jaxtrain.models.layers.decoder import attend, visible_keys
from jaxtrain.models.layers.dropout import dropout
from jaxtrain.optim import adamw
from jaxtrain.paths import none_frozen, path_name
from jaxtrain.step import window_step

ROWS, TOKENS, VOCABULARY = 16, 8, 32
ZERO_GRADIENT = "key/bias"
"""A key's bias shifts all scores of a query equally, which does not change the softmax."""


@dataclass(frozen=True)
class Run:
    """A loss, its parameters, its data and its sharding rules."""

    loss_fn: Callable[..., Any]
    make: Callable[[], tuple[Any, Any]]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    rules: Any
    frozen: Callable[[str], bool] = none_frozen


def train(
    run: Run, mesh: Any = None, *, steps: int = 20, seed: int = 0, platform: str | None = None, **options: Any
) -> tuple[Any, list[Any]]:
    """Train on one device or on `mesh`, by a platform's program; return the state and the metrics of every step."""
    options = {"accumulate": 2, "clip_norm": 1.0, "precision": "fp64", "frozen": run.frozen, **options}
    step = jt.train_step(run.loss_fn, adamw(1e-2), **options)
    if mesh is not None:
        step = shard(step, mesh, run.rules)
    if platform is not None:
        choose_program(step, platform)
    params, model_state = jax.device_get(jax.jit(run.make)())
    state = step.init(params, model_state=model_state, seed=seed)
    rng, metrics = np.random.default_rng(seed), []
    for _ in range(steps):
        state, values = step(state, run.batch(rng))
        metrics.append(jax.device_get(values))
    return state, metrics


def choose_program(step: Any, platform: str) -> None:
    """Make a step on CPU devices run the program of another platform."""
    step.jitted = step._jit(partial(window_step, step.parts.for_platform(platform)), "state", "batch")


def distance(a: Any, b: Any) -> float:
    """Return the largest difference of the arrays of two pytrees, relative to the norm of the array.

    Where the exact gradient is zero and Adam amplifies rounding, it is relative to the norm of the whole pytree.
    """
    a, b = jax.device_get((a, b))
    whole = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(a)))

    def relative(path: Any, x: Any, y: Any) -> float:
        scale = whole if re.search(ZERO_GRADIENT, path_name(path)) else np.linalg.norm(x)
        return float(np.linalg.norm(x - y) / (scale or 1))

    return max(jax.tree.leaves(jax.tree_util.tree_map_with_path(relative, a, b)))


def _stateless(model: Callable[[], nnx.Module], call: Callable[..., Any], batch: Any, rules: Any) -> Run:
    apply, _ = functional(nnx.eval_shape(model))

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return _loss(call(apply, params, batch, rng), batch["label"])

    return Run(loss_fn, lambda: (functional(model())[1], None), batch, rules)


def _with_state(model: Callable[[], nnx.Module], call: Callable[..., Any], batch: Any, rules: Any) -> Run:
    apply, *_ = functional_with_state(nnx.eval_shape(model))

    def loss_fn(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
        logits, model_state = call(apply, params, model_state, batch, rng)
        return *_loss(logits, batch["label"]), model_state

    return Run(loss_fn, lambda: functional_with_state(model())[1:], batch, rules)


def _loss(logits: Any, labels: Any) -> Any:
    # The weight differs between micro-batches and between devices.
    weight = (labels != 0).astype(logits.dtype)
    return jt.Loss((cross_entropy(logits, labels) * weight).sum(), weight.sum()), {}


def _images(side: int, channels: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"image": rng.normal(size=(ROWS, side, side, channels)), "label": rng.integers(0, 8, ROWS)}


def _tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens = rng.integers(0, VOCABULARY, (ROWS, TOKENS + 1))
    return {"tokens": tokens[:, :-1], "label": tokens[:, 1:], "mask": rng.random((ROWS, TOKENS)) < 0.8}


def _mlp() -> Run:
    model = lambda: mlp.MLP((16, 32, 24, 8), dropout=0.1, rngs=nnx.Rngs(0))  # noqa: E731
    call = lambda apply, params, batch, rng: apply(params, batch["image"], rng)  # noqa: E731
    return _stateless(model, call, partial(_images, 4, 1), mlp.SHARDING)


def _cnn(groups: int = 1) -> Run:
    def model() -> nnx.Module:
        return set_batch_norm_groups(cnn.CNN((6, 6, 3), 8, 8, batch_norm=True, dropout=0.1, rngs=nnx.Rngs(0)), groups)

    call = lambda apply, params, state, batch, rng: apply(params, state, batch["image"], True, rng)  # noqa: E731
    # The convolution's bias stays 0: BatchNorm cancels it, and its gradient is only rounding.
    run = _with_state(model, call, partial(_images, 6, 3), cnn.SHARDING)
    return replace(run, frozen=lambda path: path == "conv/bias")


def _resnet() -> Run:
    config = resnet.ResNetConfig(3, 8, (16, 32), (1, 1), "basic", num_labels=8, stem_kernel=3, stem_stride=1)
    model = lambda: resnet.ResNet(config, rngs=nnx.Rngs(0))  # noqa: E731
    call = lambda apply, params, state, batch, rng: apply(params, state, batch["image"], True)  # noqa: E731
    return _with_state(model, call, partial(_images, 8, 3), resnet.SHARDING)


def gpt2_run(layers: int = 2) -> Run:
    """Return a run of a GPT-2 with dropout."""
    config = gpt2.GPT2Config(VOCABULARY, TOKENS, n_embd=32, n_layer=layers, n_head=4, dropout=0.1)
    call = lambda apply, params, batch, rng: apply(params, batch["tokens"], rng)  # noqa: E731
    return _stateless(lambda: gpt2.GPT2(config, rngs=nnx.Rngs(0)), call, _tokens, gpt2.SHARDING)


def _small() -> Run:
    """A transformer of few arrays, which compiles fast."""
    width, layers = 16, 2
    shapes = {"qkv": (layers, 3, width, width), "out": (layers, width, width), "fc": (layers, width, 32)}
    shapes |= {"proj": (layers, 32, width), "scale": (layers, width), "table": (VOCABULARY, width)}
    rules = {
        "table": P("tensor", "fsdp"),
        "qkv": P(None, None, "fsdp", "tensor"),
        "fc": P(None, "fsdp", "tensor"),
        "out|proj": P(None, "tensor", "fsdp"),
        "scale": P(None, "fsdp"),
    }

    @jt.block
    def block(x: Any, layer: Any, key: Any) -> Any:
        visible, keys = visible_keys(TOKENS, None, None), jax.random.split(key)
        q, k, v = ((x @ layer["qkv"][i]).reshape(*x.shape[:2], 8, -1) for i in range(3))
        attended = attend(q, k, v, visible, None, None, window=None, dropout=0.0)
        x = x + dropout(checkpoint_name(attended.reshape(x.shape), "attention") @ layer["out"], 0.1, keys[0])
        return x + dropout(jnp.tanh(x * layer["scale"][None, None] @ layer["fc"]) @ layer["proj"], 0.1, keys[1])

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        layers_params = {name: x for name, x in params.items() if name != "table"}
        x, _ = lax.scan(
            lambda x, layer: (block(x, *layer), None),
            params["table"][batch["tokens"]],
            (layers_params, jax.random.split(rng, layers)),
        )
        return _loss(x @ params["table"].T, batch["label"])

    def make() -> Any:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        normal = {
            name: jax.random.normal(key, shape) / 4 for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return normal, None

    return Run(loss_fn, make, _tokens, rules)


def _lora() -> Run:
    whole = gpt2_run()
    config = gpt2.GPT2Config(VOCABULARY, TOKENS, n_embd=32, n_layer=2, n_head=4)
    adapters = lora.LoraConfig(".*(qkv|mlp_proj)/kernel", r=4, dropout=0.1)
    apply, _ = functional(nnx.eval_shape(lambda: gpt2.GPT2(config, rngs=nnx.Rngs(0))))
    adapted = lora.with_adapters(apply, adapters)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return _loss(adapted(params, batch["tokens"], rng=rng), batch["label"])

    def make() -> Any:
        base, _ = whole.make()
        return {"base": base, "lora": lora.init(jax.random.key(1), base, adapters)}, None

    return Run(loss_fn, make, _tokens, lora.sharding(gpt2.SHARDING), lora.frozen)


def llama_run(**settings: Any) -> Run:
    """Return a run of a model of the Llama family with these settings."""
    config = llama.LlamaConfig(**{**LLAMA, "attention_dropout": 0.1, **settings})
    call = lambda apply, params, batch, rng: apply(params, batch["tokens"], rng)  # noqa: E731
    return _stateless(lambda: llama.Llama(config, rngs=nnx.Rngs(0)), call, _tokens, llama.SHARDING)


def packed_run(family: Any = llama, model: Any = llama.Llama, config: Any = llama.LlamaConfig, **settings: Any) -> Run:
    """Return a run on packed rows: several sequences that do not attend to each other."""
    config = config(**LLAMA, attention_dropout=0.1, **settings)

    def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
        segments = np.sort(rng.integers(1, 4, (ROWS, TOKENS)), axis=1)
        starts = (segments[:, :, None] == segments[:, None, :]).argmax(-1)
        return {**_tokens(rng), "segments": segments, "positions": np.arange(TOKENS)[None] - starts}

    def call(apply: Any, params: Any, batch: Any, rng: Any) -> Any:
        return apply(params, batch["tokens"], rng, batch["positions"], batch["segments"])

    return _stateless(lambda: model(config, rngs=nnx.Rngs(0)), call, batch, family.SHARDING)


def _mixtral() -> Run:
    config = mixtral.MixtralConfig(**LLAMA, num_local_experts=4, attention_dropout=0.1, output_router_logits=True)
    apply, _ = functional(nnx.eval_shape(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        logits, router_logits = apply(params, batch["tokens"], rng)
        loss, _ = _loss(logits, batch["label"])
        balance = mixtral.load_balancing_loss(router_logits, config.num_experts_per_tok, batch["mask"])
        return loss._replace(total=loss.total + 0.1 * balance * loss.weight), {}

    make = lambda: (functional(mixtral.Mixtral(config, rngs=nnx.Rngs(0)))[1], None)  # noqa: E731
    return Run(loss_fn, make, _tokens, mixtral.SHARDING)


LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def _bert() -> Run:
    config = bert.BertConfig(VOCABULARY, 32, 2, 4, 64, max_position_embeddings=TOKENS)
    call = lambda apply, params, batch, rng: apply(params, batch["tokens"], batch["mask"], None, rng)  # noqa: E731
    return _stateless(lambda: bert.Bert(config, rngs=nnx.Rngs(0)), call, _tokens, bert.SHARDING)


def _vit() -> Run:
    config = vit.ViTConfig(8, 4, 3, 32, 2, 4, 64, hidden_dropout_prob=0.1, num_labels=8)
    call = lambda apply, params, batch, rng: apply(params, batch["image"], rng)  # noqa: E731
    return _stateless(lambda: vit.ViT(config, rngs=nnx.Rngs(0)), call, partial(_images, 8, 3), vit.SHARDING)


def _t5() -> Run:
    config = t5.T5Config(VOCABULARY, 32, 8, 64, 2, 2, 4, relative_attention_num_buckets=8, dropout=0.1)

    def call(apply: Any, params: Any, batch: Any, rng: Any) -> Any:
        return apply(params, batch["tokens"], t5.shift_right(batch["label"], config), batch["mask"], None, rng)

    return _stateless(lambda: t5.T5(config, rngs=nnx.Rngs(0)), call, _tokens, t5.SHARDING)


SEQUENCES = ("gpt2", "lora", "llama", "packed", "bert", "t5")
"""The families whose tokens can be divided."""

RUNS: dict[str, Callable[..., Run]] = {
    "small": _small,
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet": _resnet,
    "gpt2": gpt2_run,
    "lora": _lora,
    "llama": partial(llama_run, tie_word_embeddings=True),
    "packed": packed_run,
    "mixtral": _mixtral,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
}


PIPELINED: dict[str, Callable[..., Run]] = {
    "gpt2": partial(gpt2_run, layers=4),
    "llama": partial(llama_run, num_hidden_layers=4),
    **{name: RUNS[name] for name in ("lora", "packed", "mixtral", "bert", "vit")},
}
"""Runs whose layers a pipeline divides; those of RUNS have two layers."""


def configurations(name: str) -> list[Callable[[], tuple[Any, Any]]]:
    """Return functions that create the parameters of a family, with and without its optional parts."""
    more: dict[str, list[Callable[[], nnx.Module]]] = {
        "llama": [
            lambda: llama.Llama(llama.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True), rngs=nnx.Rngs(0)),
            lambda: llama.Llama(llama.LlamaConfig(model_type="qwen3", **LLAMA), rngs=nnx.Rngs(0)),
        ],
        "mixtral": [
            lambda: llama.Llama(llama.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True), rngs=nnx.Rngs(0)),
        ],
        "bert": [lambda: bert.Bert(bert.BertConfig(VOCABULARY, 32, 2, 4, 64, num_labels=8), rngs=nnx.Rngs(0))],
        "t5": [
            lambda: t5.T5(
                t5.T5Config(VOCABULARY, feed_forward_proj="gated-gelu", tie_word_embeddings=False), rngs=nnx.Rngs(0)
            )
        ],
    }
    makes = [lambda model=model: (functional(model())[1], None) for model in more.get(name, [])]
    return [RUNS[name]().make, *makes]
