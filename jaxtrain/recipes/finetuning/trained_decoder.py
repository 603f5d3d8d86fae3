"""A pretrained decoder as fine-tuning trains it: all of its weights, or adapters beside frozen ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.models import LoraConfig, StoredKernel, functional, is_form, lora, nf4, with_neftune
from jaxtrain.paths import path_name
from jaxtrain.recipes.finetuning.pretrained_decoder import Decoder, out_in_targets

_LOW = (jnp.bfloat16, np.float16)


@dataclass(frozen=True, eq=False, kw_only=True)
class FineTunedModel:
    """A pretrained decoder and what is trained of it.

    Its params are those of the decoder, or {"base": frozen weights, "lora": adapters}, or {"base": the initial weights,
    frozen, "model": trained weights}, where a loss compares the two.

    Args:
      decoder: The decoder.
      config: Configuration of the adapters; None trains all weights.
      quantized: Whether the kernels of the base are in NF4.
      keeps_base: Whether all weights are trained beside the initial ones.
      neftune: Size of the noise on the embeddings of tokens; None for none.
      seed: Seed of the initial adapters.
    """

    decoder: Decoder
    config: LoraConfig | None = None
    quantized: bool = False
    keeps_base: bool = False
    neftune: float | None = None
    seed: int = 0

    def init(self) -> Any:
        """Create the params, with zeros for the weights, which `load` reads."""
        base = jax.tree_util.tree_map_with_path(self._zeros, self.decoder.weights.shapes)
        if self.config is not None:
            return {"base": base, "lora": self._adapters(base)}
        return {"base": base, "model": base} if self.keeps_base else base

    def load(self, like: Any) -> Any:
        """Read the weights into their shards, kernel by kernel; `init` creates the adapters.

        Args:
          like: Shapes, dtypes and shardings of the params, with None for those that are not read.
        """
        if self.config is not None:
            base = nf4.read_params(self.decoder.weights.stored, like["base"])
            # The norms of DoRA are those of the base, and what is trained beside the adapters is a copy.
            is_created = jax.tree.leaves(like["lora"]) and (self.config.dora or self.config.trained)
            shardings = jax.tree.map(lambda x: x.sharding, like["lora"])
            return {
                "base": base,
                "lora": jax.jit(self._adapters, out_shardings=shardings)(base) if is_created else None,
            }
        if self.keeps_base:
            return {name: None if part is None else self.decoder.weights.params(part) for name, part in like.items()}
        return self.decoder.weights.params(like)

    def _zeros(self, path: Any, like: Any) -> Any:
        zeros, out_in = jnp.zeros(like.shape, like.dtype), self.decoder.kernels.get(path_name(path))
        if out_in is None or not self.quantized:
            return zeros
        # Dequantized to float32, in which nothing is rounded once more.
        return nf4.quantize(zeros.astype(np.float32), out_in=out_in)

    def _adapters(self, base: Any) -> Any:
        assert self.config is not None
        return lora.init(jax.random.key(self.seed), base, self.config)

    @property
    def frozen(self) -> Callable[[str], bool] | None:
        """Predicate on paths: what is not trained, and is read from the folder again; None for nothing."""
        return lora.frozen if self.config is not None or self.keeps_base else None

    @property
    def sharding(self) -> Mapping[str, PartitionSpec]:
        """Sharding rules of the params."""
        rules = self.decoder.weights.sharding
        if self.quantized:
            rules = nf4.sharding(rules, out_in=out_in_targets(self.decoder))
        if self.config is not None:
            return lora.sharding(rules, self.config)
        if self.keeps_base:
            return {f"(base|model)/({pattern})": spec for pattern, spec in rules.items()}
        return rules

    def log_probs(self, params: Any, batch: Mapping[str, Any], rng: jax.Array | None) -> jax.Array:
        """Return the log-probability of every target, float [B, T].

        Args:
          params: The params.
          batch: `tokens`, `targets`, `positions` and `segments`, int [B, T].
          rng: Key of dropout and noise; None in evaluation.
        """
        dropout, adapters, noise = (None, None, None) if rng is None else jax.random.split(rng, 3)
        compute: Callable[..., Any] = self.decoder.log_probs
        if self.neftune is not None:
            table, scale = self.decoder.embeddings
            compute = partial(with_neftune(compute, table, self.neftune / scale), rng=noise)
        inputs = batch["tokens"], batch["targets"], dropout, batch["positions"], batch["segments"]
        return self._adapted(compute, adapters)(params, *inputs)

    def base_log_probs(self, params: Any, batch: Mapping[str, Any]) -> jax.Array:
        """Return the log-probabilities under the initial weights, without adapters, as `log_probs` in evaluation."""
        compute: Callable[..., Any] = self.decoder.log_probs
        if self.quantized:
            compute = nf4.with_quantized(compute)
        result: jax.Array = compute(
            params["base"], batch["tokens"], batch["targets"], None, batch["positions"], batch["segments"]
        )
        return result

    def logits(self, params: Any, batch: Mapping[str, Any]) -> jax.Array:
        """Return the logits of every target, float [B, T, vocabulary], in evaluation."""
        inputs = batch["tokens"], batch["positions"], batch["segments"]
        return self._adapted(self.decoder.logits, None)(params, *inputs)

    def scores(self, params: Any, tokens: jax.Array, rng: jax.Array | None) -> jax.Array:
        """Return the logits of a classifier, float [B, labels].

        Args:
          params: The params.
          tokens: int [B, T], padded at the end.
          rng: Key of dropout; None in evaluation.
        """
        dropout, adapters = (None, None) if rng is None else jax.random.split(rng)
        compute, _ = functional(self.decoder.weights.model)
        return self._adapted(compute, adapters)(params, tokens, dropout)

    def merged(self, params: Any) -> Any:
        """Return the parameters of the decoder in float32 at least: with adapters merged, dequantized."""
        wide = _wide(params)
        if self.config is not None:
            return lora.merge(wide["base"], wide["lora"], self.config)
        return wide["model"] if self.keeps_base else wide

    def on_stored_base(self, params: Any) -> Any:
        """Return the parameters of the decoder with adapters merged into the weights as they are stored."""
        assert self.config is not None
        base = self.decoder.weights.params() if self.quantized else params["base"]
        return lora.merge(_wide(base), params["lora"], self.config)

    def adapted(self, params: Any) -> Any:
        """Return the parameters of the decoder for `generate` and `stream`, with adapters that are not merged."""
        if self.config is None:
            return _wide(params["model"] if self.keeps_base else params)
        base = jax.tree_util.tree_map_with_path(self._stored_kernel, params["base"], is_leaf=is_form)
        return lora.adapted(_wide(base), params["lora"], self.config)

    def _stored_kernel(self, path: Any, x: Any) -> Any:
        """Return a kernel in low precision as one that is converted to float32 where a product needs it."""
        out_in = self.decoder.kernels.get(path_name(path))
        return x if out_in is None or x.dtype not in _LOW else StoredKernel(x, np.dtype(np.float32), out_in)

    def _adapted(self, compute: Callable[..., Any], rng: jax.Array | None) -> Callable[..., jax.Array]:
        """Return a function of the params from one of the decoder's."""
        if self.config is not None:
            return partial(lora.with_adapters(compute, self.config), rng=rng)
        return lambda params, *inputs: compute(params["model"] if self.keeps_base else params, *inputs)


def _wide(params: Any) -> Any:
    """Return parameters with bfloat16 and float16 ones, but for kernels that have another form, in float32."""
    return jax.tree.map(
        lambda x: x.astype(np.float32) if x.dtype in _LOW and not is_form(x) else x, params, is_leaf=is_form
    )
