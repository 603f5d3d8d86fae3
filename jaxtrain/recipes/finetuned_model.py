"""A pretrained decoder as fine-tuning trains it: all of its weights, or adapters beside frozen ones."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

import jaxtrain as jt
from jaxtrain.models import LoraConfig, PretrainedModel, functional, log_probs, lora, nf4, with_neftune
from jaxtrain.paths import path_name

_EMBEDDINGS = ("wte", "embed_tokens")  # of GPT-2, and of the Llama family


@dataclass(frozen=True, eq=False, kw_only=True)
class FineTunedModel:
    """A pretrained decoder and what is trained of it.

    Its params are those of the decoder, or {"base": frozen weights, "lora": adapters}, or {"base": the initial weights,
    frozen, "model": trained weights}, where a loss compares the two.

    Args:
      pretrained: The decoder.
      config: Configuration of the adapters; None trains all weights.
      quantized: Whether the kernels of the base are in NF4.
      keeps_base: Whether all weights are trained beside the initial ones.
      neftune: Size of the noise on the embeddings of tokens; None for none.
      seed: Seed of the initial adapters.
    """

    pretrained: PretrainedModel
    config: LoraConfig | None = None
    quantized: bool = False
    keeps_base: bool = False
    neftune: float | None = None
    seed: int = 0

    def init(self) -> Any:
        """Read the weights, kernel by kernel, and create the adapters."""
        kernels = set(linear_kernels(self.pretrained)) if self.quantized else set()
        base = self.pretrained.params(lambda path, x: nf4.quantize(x) if path in kernels else x)
        if self.config is not None:
            return {"base": base, "lora": lora.init(jax.random.key(self.seed), base, self.config)}
        return {"base": base, "model": base} if self.keeps_base else base

    @property
    def frozen(self) -> Callable[[str], bool] | None:
        """Predicate on paths: what is not trained, and is read from the folder again; None for nothing."""
        return lora.frozen if self.config is not None or self.keeps_base else None

    @property
    def sharding(self) -> Mapping[str, PartitionSpec]:
        """Sharding rules of the params."""
        rules = self.pretrained.sharding
        if self.config is not None:
            # The rules of the adapters follow those of the kernels, whose packed weights have rules of their own.
            base = lora.sharding(nf4.sharding(rules)) if self.quantized else {}
            return base | lora.sharding(rules)
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
        compute, _ = functional(self.pretrained.model, log_probs)
        if self.neftune is not None:
            compute = partial(with_neftune(compute, self._embeddings(), self.neftune), rng=noise)
        inputs = batch["tokens"], batch["targets"], dropout, batch["positions"], batch["segments"]
        return self._adapted(compute, adapters)(params, *inputs)

    def base_log_probs(self, params: Any, batch: Mapping[str, Any]) -> jax.Array:
        """Return the log-probabilities under the initial weights, without adapters, as `log_probs` in evaluation."""
        compute, _ = functional(self.pretrained.model, log_probs)
        if self.quantized:
            compute = nf4.with_quantized(compute)
        result: jax.Array = compute(
            params["base"], batch["tokens"], batch["targets"], None, batch["positions"], batch["segments"]
        )
        return result

    def logits(self, params: Any, batch: Mapping[str, Any]) -> jax.Array:
        """Return the logits of every target, float [B, T, vocabulary], in evaluation."""
        compute, _ = functional(self.pretrained.model)
        return self._adapted(compute, None)(params, batch["tokens"], None, batch["positions"], batch["segments"])

    def merged(self, params: Any) -> Any:
        """Return the parameters of the decoder: with adapters merged, dequantized."""
        if self.config is not None:
            return lora.merge(params["base"], params["lora"], self.config)
        return params["model"] if self.keeps_base else params

    def _adapted(self, compute: Callable[..., Any], rng: jax.Array | None) -> Callable[..., jax.Array]:
        """Return a function of the params from one of the decoder's."""
        if self.config is not None:
            return partial(lora.with_adapters(compute, self.config), rng=rng)
        return lambda params, *inputs: compute(params["model"] if self.keeps_base else params, *inputs)

    def _embeddings(self) -> str:
        """Return the path of the embeddings of tokens."""
        return next(name for name in _EMBEDDINGS if name in self.pretrained.names.params)


def linear_kernels(pretrained: PretrainedModel) -> list[str]:
    """Return the paths of the kernels of all linear layers but the head: what QLoRA adapts and quantizes."""
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(pretrained.params))
    # Those of the blocks are stacked, [layers, in, out].
    named = ((path_name(path), leaf) for path, leaf in shapes)
    return [path for path, leaf in named if path.endswith("/kernel") and leaf.ndim == 3]


def adapter_config(
    pretrained: PretrainedModel, targets: str | None, *, rank: int, alpha: float, dropout: float, dora: bool
) -> LoraConfig:
    """Return the configuration of adapters for the linear layers, or for those whose paths `targets` matches.

    Raises:
      UserError: No linear layer matches.
    """
    kernels = linear_kernels(pretrained)
    try:
        chosen = [path for path in kernels if targets is None or re.fullmatch(targets, path)]
    except re.error as error:
        raise jt.UserError(f"targets {targets!r} is not a regular expression ({error}): use one such as .*/kernel") from None
    if not chosen:
        raise jt.UserError(f"targets {targets!r} match no whole path of a linear layer: these are {', '.join(kernels)}")
    return LoraConfig("|".join(map(re.escape, chosen)), rank, alpha, dropout, dora=dora)
