"""Mixtral (Jiang et al. 2024), as `transformers` computes it: Llama whose MLPs are sparse mixtures of experts.

Every token goes to its `num_experts_per_tok` likeliest experts. Tokens are sorted by expert, and one grouped product
(`jax.lax.ragged_dot`) takes each expert's share through its weights: no token is dropped, none is padded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import LINEAR, Layout, NameTable, TorchParam
from jaxtrain.models import llama
from jaxtrain.models.llama import Llama, LlamaConfig, silu
from jaxtrain.models.rope import DEFAULT, Rope

WIDER = replace(DEFAULT, rope_theta=1e6)
"""Rotary embeddings for the longer texts that Mixtral was trained on."""


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Sizes and switches; the names, and the defaults, are those of `transformers.MixtralConfig`.

    With `output_router_logits` the model returns these too, for `load_balancing_loss`, which is added to the mean loss
    `router_aux_loss_coef` times.
    """

    model_type: str = "mixtral"
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rope_parameters: Rope = WIDER
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


class Experts(nnx.Module):
    """[B, T, hidden_size] → the mean of the chosen experts' outputs, weighted by the router's probabilities, and the
    router's logits [B, T, num_local_experts].

    Of experts that are equally likely those of lower number are chosen; PyTorch says of none which.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        assert isinstance(config, MixtralConfig)
        self.config = config
        experts, width, hidden = config.num_local_experts, config.hidden_size, config.intermediate_size
        normal = nnx.initializers.normal(config.initializer_range)
        self.gate = nnx.Param(normal(rngs.params(), (width, experts)))
        self.gate_up_proj = nnx.Param(normal(rngs.params(), (experts, width, 2 * hidden)))
        self.down_proj = nnx.Param(normal(rngs.params(), (experts, hidden, width)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ self.gate[...]
        tokens, chosen = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_tok
        wide = logits.astype(np.promote_types(logits.dtype, np.float32)).reshape(tokens.shape[0], -1)
        probabilities, experts = lax.top_k(jax.nn.softmax(wide, axis=-1), chosen)
        weights = probabilities / probabilities.sum(axis=-1, keepdims=True)
        order = jnp.argsort(experts.reshape(-1))
        shares = jnp.bincount(experts.reshape(-1), length=self.config.num_local_experts).astype(np.int32)
        outputs = self.computed(tokens[order // chosen], shares)[jnp.argsort(order)]
        mean = (outputs.reshape(tokens.shape[0], chosen, -1) * weights[..., None].astype(x.dtype)).sum(axis=1)
        return mean.reshape(x.shape), logits

    def computed(self, x: jax.Array, shares: jax.Array) -> jax.Array:
        """[tokens, hidden_size], of which the first `shares[0]` are the first expert's, and so on → the same."""
        gate, up = jnp.split(lax.ragged_dot(x, self.gate_up_proj[...], shares), 2, axis=-1)
        hidden = checkpoint_name(silu(gate) * up, "hidden")
        return lax.ragged_dot(hidden, self.down_proj[...], shares)


class Mixtral(Llama):
    """As `Llama`; with `output_router_logits` and no cache it returns (logits, router logits [L, B, T, experts])."""

    feed_forward: ClassVar[Callable[..., Any]] = Experts

    def output(self, logits: jax.Array, told: Any) -> Any:
        """With the router's logits, if they are asked for."""
        assert isinstance(self.config, MixtralConfig)
        return (logits, told) if self.config.output_router_logits else logits


def load_balancing_loss(router_logits: jax.Array, chosen: int, mask: jax.Array | None = None) -> jax.Array:
    """experts · Σᵢ fᵢ Pᵢ: how unevenly the router spreads tokens [L, B, T, experts] (Fedus et al. 2021, equation 4).

    fᵢ is how often expert i is among the `chosen` of a token, Pᵢ the probability it is given, on average over all
    layers and the tokens that `mask` [B, T] keeps. `chosen` is its least, where all are alike.

    >>> round(float(load_balancing_loss(jnp.zeros((1, 2, 3, 4)), chosen=2)), 6)
    2.0
    """
    experts = router_logits.shape[-1]
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    probabilities = probabilities.astype(np.promote_types(probabilities.dtype, np.float32))
    _, indices = lax.top_k(probabilities, chosen)
    counts = jax.nn.one_hot(indices, experts, dtype=probabilities.dtype).sum(axis=-2)
    kept = jnp.ones(router_logits.shape[1:3], bool) if mask is None else mask
    weights = jnp.broadcast_to(kept[None, ..., None].astype(probabilities.dtype), (*router_logits.shape[:-1], 1))
    fractions, means = ((y * weights).sum((0, 1, 2)) / weights.sum() for y in (counts, probabilities))
    return experts * (fractions * means).sum()


SHARDING = {
    "layers/mlp/gate": P(None, "fsdp", None),
    "layers/mlp/gate_up_proj": P(None, None, "fsdp", "tensor"),
    "layers/mlp/down_proj": P(None, None, "tensor", "fsdp"),
    **llama.SHARDING,
}
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`): each expert as a Llama's MLP is."""

EXPERTS = Layout(lambda x: x.swapaxes(-1, -2), lambda x: x.swapaxes(-1, -2), "EXPERTS")
"""Of each expert `torch.nn.Linear`'s [out, in]."""


def torch_names(config: MixtralConfig) -> NameTable:
    """The names in `transformers.MixtralForCausalLM`, which keeps the experts of a layer in one tensor."""
    mlp = "model.layers.{layer}.mlp"
    experts = {
        "layers/mlp/gate": TorchParam(f"{mlp}.gate.weight", LINEAR),
        "layers/mlp/gate_up_proj": TorchParam(f"{mlp}.experts.gate_up_proj", EXPERTS),
        "layers/mlp/down_proj": TorchParam(f"{mlp}.experts.down_proj", EXPERTS),
    }
    return llama.name_table(config, experts)


def from_hf(config: Mapping[str, Any]) -> MixtralConfig:
    """The `MixtralConfig` of a Hugging Face config.json.

    Raises `UserError` for what would change the numbers and is not supported.
    """
    if config.get("model_type") != "mixtral":
        raise UserError(f"model_type {config.get('model_type')!r} is no mixtral: read it as what it is")
    return MixtralConfig(**llama.fields_from_hf(config, MixtralConfig))


def to_hf(config: MixtralConfig) -> dict[str, Any]:
    """A config.json that `transformers` reads back into the same model.

    >>> from_hf(to_hf(MixtralConfig(num_local_experts=4))).num_local_experts
    4
    """
    return llama.to_hf(config)
