"""The built-in cases by name. Listing them imports neither framework."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from parity.case import Case

SUMMARIES = {
    "mlp": "perceptron 784-512-10, ReLU",
    "cnn": "convolution 3→16 of 3×3, ReLU, linear, on 32×32 images",
    "cnn-bn": "the same with BatchNorm, on 10×10 images, running statistics included",
    "gpt2": "transformers.GPT2LMHeadModel of 2 layers, width 32, 4 heads",
    "llama": "transformers.LlamaForCausalLM of 2 layers, grouped queries, Llama 3.1's rotary scaling, padded rows",
    "llama.qwen3": "Qwen3ForCausalLM: norms on queries and keys, one key head, a window in one layer",
    "llama.mistral": "MistralForCausalLM: a window shorter than the rows",
    "llama.packed": "LlamaForCausalLM with biases and YaRN, three sequences to a row",
    "mixtral": "transformers.MixtralForCausalLM of 2 layers, 4 experts, the router's loss",
    "t5": "transformers.T5ForConditionalGeneration of 2 + 2 layers, padded on both sides",
    "t5.gated": "T5 v1.1 and FLAN-T5: gated GELU, a separate output layer",
    "bert": "transformers.BertForMaskedLM of 2 layers, padded rows, two token types",
    "bert.classifier": "transformers.BertForSequenceClassification of the same",
    "vit": "transformers.ViTForImageClassification of 2 layers, on 9×13 images in 4×6 patches",
    "resnet": "transformers.ResNetForImageClassification, basic layers, running statistics included",
    "resnet.bottleneck": "the same with bottleneck layers, version 1.5",
    "resnet.small-stem": "the same with a 3×3 stem, without pooling, on 8×8 images",
    "lora": "adapters of rank 3 on GPT-2, the rest frozen",
    "migration": "GPT-2, stopped in PyTorch at step 50 of 100 and continued by both",
    "losses.cross-entropy": "a quarter of the labels ignored",
    "losses.cross-entropy-weighted": "label smoothing and class weights",
    "losses.nll": "negative log-likelihood, classes weighted",
    "losses.mse": "squared error",
    "losses.l1": "absolute error",
    "losses.smooth-l1": "SmoothL1, β ½",
    "losses.huber": "Huber, δ ½",
    "losses.binary-cross-entropy": "with logits and weights of positives",
    "losses.kl-div": "Kullback-Leibler divergence",
    "losses.hinge-embedding": "hinge of distances",
    "losses.cosine-embedding": "pairs of embeddings, margin 0.2",
    "losses.triplet-margin": "triplets of embeddings, swapped",
    "losses.clip": "transformers' symmetric contrastive loss",
    "losses.chunked-cross-entropy": "projection and loss of 3 rows at a time",
    "autograd.square": "(w·x + b)², every factor a parameter",
    "autograd.cubic": "x³ + 2x + 1",
    "autograd.detach": "a factor detached",
    "autograd.no-grad": "a target computed without gradient",
    "autograd.double-backward": "a second derivative in the loss",
    "autograd.reuse": "a parameter used twice",
    "gradient-penalty": "Wasserstein critic 8-16-16-1, softplus, with the gradient of its input in the loss",
    "maml": "perceptron 1-16-16-1, tanh, trained through a step of gradient descent",
}
"""Summary of each case. A dotted name is one of several cases of a module."""


def _load(name: str, **options: Any) -> Case:
    from jaxtrain.errors import UserError  # imports JAX, which listing does not need

    module_name, _, function = name.replace("-", "_").partition(".")
    try:
        module = importlib.import_module(f"parity.cases.built_in.{module_name}_case")
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise UserError(f"{package} is not installed: pip install 'jaxtrain[parity]'") from missing
    make = getattr(module, function or "case")
    for option in options.keys() - inspect.signature(make).parameters.keys():
        raise UserError(f"{name} has no {option}: leave it out, or name only cases that have it")
    return make(**options)


CASES: dict[str, Callable[..., Case]] = {name: partial(_load, name) for name in SUMMARIES}
"""From each name to a function that creates the case from keyword arguments.

Calling it imports what the case needs, or raises `UserError` if that is not installed."""


def case_of(name: str, **options: Any) -> Case:
    """Return the case of that name, or of a user's file as `path/to/file.py::name`."""
    if "::" in name:
        from parity.cases.own import own_case

        return own_case(name, **options)
    return CASES[name](**options)
