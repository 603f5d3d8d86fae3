"""Models in flax.nnx, one file or folder per family. Dtypes follow the parameters and inputs."""

from jaxtrain.models import attention as attention
from jaxtrain.models import batch_norm as batch_norm
from jaxtrain.models import layers as layers
from jaxtrain.models.batch_norm import BatchNorm, running_statistics, set_batch_norm_groups
from jaxtrain.models.bert import Bert, BertConfig
from jaxtrain.models.cnn import CNN
from jaxtrain.models.embedding_noise import neftune, with_neftune
from jaxtrain.models.files.folder import CONFIG as CONFIG
from jaxtrain.models.files.folder import read_json as read_json
from jaxtrain.models.files.folder import read_tensors as read_tensors
from jaxtrain.models.files.folder import stored_dtype as stored_dtype
from jaxtrain.models.files.folder import write_json as write_json
from jaxtrain.models.files.folder import write_tensors as write_tensors
from jaxtrain.models.files.folder_digest import folder_digest as folder_digest
from jaxtrain.models.files.pretrained import FAMILIES as FAMILIES
from jaxtrain.models.files.pretrained import PretrainedModel, from_pretrained, open_pretrained, save_pretrained
from jaxtrain.models.functional import functional, functional_with_state
from jaxtrain.models.functional_loss import functional_loss
from jaxtrain.models.generation import GREEDY as GREEDY
from jaxtrain.models.generation import Sampling, generate, stream
from jaxtrain.models.gpt2 import GPT2, GPT2Config
from jaxtrain.models.layers.rope import Rope as Rope
from jaxtrain.models.llama import Llama, LlamaConfig
from jaxtrain.models.lora import LoraConfig
from jaxtrain.models.mixtral import Mixtral, MixtralConfig
from jaxtrain.models.mlp import MLP
from jaxtrain.models.nf4 import QuantizedKernel, dequantize_params, quantize_params
from jaxtrain.models.parameter_forms import StoredKernel as StoredKernel
from jaxtrain.models.parameter_forms import is_form as is_form
from jaxtrain.models.peft import load_adapters, save_adapters
from jaxtrain.models.resnet import RESNET_18, RESNET_34, RESNET_50, ResNet, ResNetConfig
from jaxtrain.models.routed_experts import find_routed_experts as find_routed_experts
from jaxtrain.models.routed_experts import routed_experts
from jaxtrain.models.sequence_classifier import CLASSIFIERS as CLASSIFIERS
from jaxtrain.models.sequence_classifier import NewHead, SequenceClassifier, SequenceClassifierConfig
from jaxtrain.models.t5 import T5, T5Config
from jaxtrain.models.text import generate_texts, stream_text
from jaxtrain.models.token_log_probs import log_probs
from jaxtrain.models.vit import ViT, ViTConfig

__all__ = [
    "CNN",
    "GPT2",
    "MLP",
    "RESNET_18",
    "RESNET_34",
    "RESNET_50",
    "T5",
    "BatchNorm",
    "Bert",
    "BertConfig",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "Mixtral",
    "MixtralConfig",
    "NewHead",
    "PretrainedModel",
    "QuantizedKernel",
    "ResNet",
    "ResNetConfig",
    "Sampling",
    "SequenceClassifier",
    "SequenceClassifierConfig",
    "T5Config",
    "ViT",
    "ViTConfig",
    "bert",
    "cnn",
    "dequantize_params",
    "from_pretrained",
    "functional",
    "functional_loss",
    "functional_with_state",
    "generate",
    "generate_texts",
    "gpt2",
    "llama",
    "load_adapters",
    "log_probs",
    "lora",
    "mixtral",
    "mlp",
    "neftune",
    "nf4",
    "open_pretrained",
    "peft",
    "quantize_params",
    "resnet",
    "routed_experts",
    "running_statistics",
    "save_adapters",
    "save_pretrained",
    "set_batch_norm_groups",
    "stream",
    "stream_text",
    "t5",
    "vit",
    "with_neftune",
]
