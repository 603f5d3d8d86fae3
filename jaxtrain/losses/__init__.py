"""Losses per element or per example, without reduction: `jaxtrain.Loss.of` sums them.

Names, options and formulas are PyTorch's (`torch.nn.functional`, `reduction="none"`), and so are the gradients where
the derivative does not exist. Under autocast they run in float32. `mask_tokens` makes the inputs of masked language
modeling. `supervised` sums the losses of tokens with the weights of their sequences; `dpo`, `ipo` and `bradley_terry`
learn from pairs of answers, with the formulas of TRL.
"""

from jaxtrain.losses import subgradients as subgradients
from jaxtrain.losses.chunked_cross_entropy import chunked_cross_entropy
from jaxtrain.losses.classification import binary_cross_entropy_with_logits, cross_entropy, kl_div, label_weights, nll
from jaxtrain.losses.embedding import clip, cosine_embedding, hinge_embedding, info_nce, triplet_margin
from jaxtrain.losses.masking import mask_tokens
from jaxtrain.losses.preference import bradley_terry, dpo, ipo
from jaxtrain.losses.regression import huber, l1, mse, smooth_l1
from jaxtrain.losses.sequences import supervised
from jaxtrain.losses.subgradients import norm as norm

__all__ = [
    "binary_cross_entropy_with_logits",
    "bradley_terry",
    "chunked_cross_entropy",
    "clip",
    "cosine_embedding",
    "cross_entropy",
    "dpo",
    "hinge_embedding",
    "huber",
    "info_nce",
    "ipo",
    "kl_div",
    "l1",
    "label_weights",
    "mask_tokens",
    "mse",
    "nll",
    "smooth_l1",
    "supervised",
    "triplet_margin",
]
