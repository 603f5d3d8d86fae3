"""The Llama family, as `transformers` computes it: Llama 2 and 3 (including SmolLM), Mistral, Qwen2, Qwen3, SmolLM3."""

from jaxtrain.models.llama.llama_config import MODEL_TYPES, LlamaConfig, from_hf, to_hf
from jaxtrain.models.llama.llama_model import Llama
from jaxtrain.models.llama.llama_parameters import SHARDING, torch_names

__all__ = ["MODEL_TYPES", "SHARDING", "Llama", "LlamaConfig", "from_hf", "to_hf", "torch_names"]
