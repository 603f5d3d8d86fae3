"""Mixtral (Jiang et al. 2024), as `transformers` computes it: a Llama whose MLPs are sparse mixtures of experts.

Every token is routed to its `num_experts_per_tok` most likely experts (`jaxtrain.models.routed_experts`).
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
from jaxtrain.models.layers.rope import DEFAULT, Rope
from jaxtrain.models.llama import Llama, LlamaConfig
from jaxtrain.models.llama.llama_config import fields_from_hf
from jaxtrain.models.llama.llama_model import gated_silu
from jaxtrain.models.llama.llama_parameters import name_table
from jaxtrain.models.routed_experts import routed_experts

ROPE = replace(DEFAULT, rope_theta=1e6)
"""Default rotary embeddings, with the larger base that Mixtral was trained with."""


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Configuration of a Mixtral, with the field names and defaults of `transformers.MixtralConfig`.

    Attributes:
      output_router_logits: Whether the model returns the router's logits too, for `load_balancing_loss`.
      router_aux_loss_coef: Weight of that loss beside the mean loss of the tokens.
    """

    model_type: str = "mixtral"
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rope_parameters: Rope = ROPE
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


class Experts(nnx.Module):
    """Sparse mixture of SwiGLU experts on [B, T, hidden_size].

    It returns the mean of the selected experts' outputs, weighted by the router's probabilities, and the router's
    logits [B, T, num_local_experts]. Among equally likely experts the first are selected; PyTorch leaves this open.
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
        wide = logits.astype(np.promote_types(logits.dtype, np.float32))
        probabilities, chosen = lax.top_k(jax.nn.softmax(wide, axis=-1), self.config.num_experts_per_tok)
        weights = probabilities / probabilities.sum(axis=-1, keepdims=True)
        outputs = routed_experts(_swiglu, x, chosen, self.gate_up_proj[...], self.down_proj[...])
        return (outputs * weights[..., None].astype(x.dtype)).sum(axis=-2), logits


def _swiglu(x: jax.Array, group_sizes: jax.Array, gate_up_proj: jax.Array, down_proj: jax.Array) -> jax.Array:
    gate, up = jnp.split(lax.ragged_dot(x, gate_up_proj, group_sizes), 2, axis=-1)
    hidden = checkpoint_name(gated_silu(gate, up), "hidden")
    return lax.ragged_dot(hidden, down_proj, group_sizes)


class Mixtral(Llama):
    """Decoder called as `Llama`, whose MLPs are `Experts`.

    With `output_router_logits` and no cache it returns a tuple (logits, router logits [L, B, T, experts]).
    """

    feed_forward: ClassVar[Callable[..., Any]] = Experts

    def output(self, logits: jax.Array, aux: Any) -> Any:
        """Return the logits, with those of the routers if the configuration asks for them."""
        assert isinstance(self.config, MixtralConfig)
        return (logits, aux) if self.config.output_router_logits else logits


def load_balancing_loss(router_logits: jax.Array, top_k: int, mask: jax.Array | None = None) -> jax.Array:
    """Compute the load-balancing loss, experts · Σᵢ fᵢ Pᵢ (Fedus et al. 2021, equation 4).

    fᵢ is the frequency of expert i among the `top_k` of a token and Pᵢ its mean probability, over all layers and
    tokens. The minimum, `top_k`, is reached where all experts are equally frequent.

    Args:
      router_logits: [L, B, T, experts].
      top_k: Number of experts per token.
      mask: bool [B, T], True at the tokens to count; None for all.

    Returns:
      float [], in float32 at least.

    Example:
      >>> round(float(load_balancing_loss(jnp.zeros((1, 2, 3, 4)), top_k=2)), 6)
      2.0
    """
    experts = router_logits.shape[-1]
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    probabilities = probabilities.astype(np.promote_types(probabilities.dtype, np.float32))
    counts, weights = _choices(probabilities, top_k, mask)
    fractions, means = ((y * weights).sum((0, 1, 2)) / weights.sum() for y in (counts, probabilities))
    return experts * (fractions * means).sum()


def expert_load(router_logits: jax.Array, top_k: int, mask: jax.Array | None = None) -> jax.Array:
    """Compute the share of the tokens that each expert receives, as a metric; 1 / experts for each if balanced.

    Args:
      router_logits: [L, B, T, experts].
      top_k: Number of experts per token.
      mask: bool [B, T], True at the tokens to count; None for all.

    Returns:
      float [L, experts], in float32 at least. The sums over neighboring experts are the shares of the devices of the
      mesh axis `expert`.

    Example:
      >>> expert_load(jnp.array([[[[0.0, 1.0, 2.0, 3.0]]]]), top_k=2).tolist()
      [[0.0, 0.0, 0.5, 0.5]]
    """
    counts, weights = _choices(router_logits, top_k, mask)
    return (counts * weights).sum((1, 2)) / (top_k * weights.sum((1, 2)))


def _choices(probabilities: jax.Array, top_k: int, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return whether each expert is among the `top_k` of a token, and the weight of the token, [L, B, T, 1]."""
    dtype = np.promote_types(probabilities.dtype, np.float32)
    _, indices = lax.top_k(probabilities, top_k)
    counts = jax.nn.one_hot(indices, probabilities.shape[-1], dtype=dtype).sum(axis=-2)
    counted = jnp.ones(probabilities.shape[1:3], bool) if mask is None else mask
    return counts, jnp.broadcast_to(counted[None, ..., None].astype(dtype), (*probabilities.shape[:-1], 1))


SHARDING = {
    "layers/mlp/gate": P("pipeline", "fsdp", None),
    "layers/mlp/gate_up_proj": P("pipeline", "expert", "fsdp", "tensor"),
    "layers/mlp/down_proj": P("pipeline", "expert", "tensor", "fsdp"),
    **llama.SHARDING,
}
"""Mesh axes that shard each axis, by parameter path; within an expert they are those of the MLP of a Llama."""

EXPERTS = Layout(
    lambda x: x.swapaxes(-1, -2),
    lambda x: x.swapaxes(-1, -2),
    "EXPERTS",
    lambda index: (*index[:-2], index[-1], index[-2]),
)
"""A stack of `torch.nn.Linear` weights [experts, out, in]."""


def torch_names(config: MixtralConfig) -> NameTable:
    """Return the names in `transformers.MixtralForCausalLM`, which stacks the experts of a layer in one tensor."""
    mlp = "model.layers.{layer}.mlp"
    experts = {
        "layers/mlp/gate": TorchParam(f"{mlp}.gate.weight", LINEAR),
        "layers/mlp/gate_up_proj": TorchParam(f"{mlp}.experts.gate_up_proj", EXPERTS),
        "layers/mlp/down_proj": TorchParam(f"{mlp}.experts.down_proj", EXPERTS),
    }
    return name_table(config, experts)


def from_hf(config: Mapping[str, Any]) -> MixtralConfig:
    """Return the `MixtralConfig` of a Hugging Face config.json.

    Raises:
      UserError: The model type is not mixtral, or a setting that changes the result is not supported.
    """
    if config.get("model_type") != "mixtral":
        raise UserError(f"model_type must be 'mixtral', got {config.get('model_type')!r}")
    return MixtralConfig(**fields_from_hf(config, MixtralConfig))


def to_hf(config: MixtralConfig) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Example:
      >>> from_hf(to_hf(MixtralConfig(num_local_experts=4))).num_local_experts
      4
    """
    return llama.to_hf(config)
