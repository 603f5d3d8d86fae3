"""Models in flax.nnx, one file a family. Dtypes follow the parameters and inputs: none is hard-wired."""

from jaxtrain.models.cnn import CNN
from jaxtrain.models.functional import functional
from jaxtrain.models.gpt2 import GPT2, GPT2Config
from jaxtrain.models.mlp import MLP

__all__ = ["CNN", "GPT2", "MLP", "GPT2Config", "functional"]
