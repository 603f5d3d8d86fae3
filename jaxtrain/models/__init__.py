"""Models in flax.nnx, one file a family. Dtypes follow the parameters and inputs: none is hard-wired."""

from jaxtrain.models.batch_norm import BatchNorm
from jaxtrain.models.cnn import CNN
from jaxtrain.models.functional import functional, functional_with_state
from jaxtrain.models.gpt2 import GPT2, GPT2Config
from jaxtrain.models.mlp import MLP

__all__ = ["CNN", "GPT2", "MLP", "BatchNorm", "GPT2Config", "functional", "functional_with_state"]
