"""Function to function by its jaxpr: precision, rematerialization, unrolling, hooks. Knows nothing of training."""

from jaxtrain.transforms.bias import biased_products
from jaxtrain.transforms.hooks import Hook, hook, hooked
from jaxtrain.transforms.merged_rows import Apart
from jaxtrain.transforms.precision import KERNEL, Policy, autocast, autocast_disabled, kernel, low_precision, policy
from jaxtrain.transforms.remat import BLOCK, block, remat
from jaxtrain.transforms.unroll import unroll

__all__ = [
    "BLOCK",
    "KERNEL",
    "Apart",
    "Hook",
    "Policy",
    "autocast",
    "autocast_disabled",
    "biased_products",
    "block",
    "hook",
    "hooked",
    "jax_internals",
    "jaxpr",
    "kernel",
    "low_precision",
    "policy",
    "precision",
    "remat",
    "unroll",
]
