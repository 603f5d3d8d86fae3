"""Transforms of functions through their jaxprs: precision, rematerialization, unrolling, hooks; unaware of training."""

from jaxtrain.transforms.bias import biased_products
from jaxtrain.transforms.hooks import Hook, add_hooks, hook
from jaxtrain.transforms.merged_rows import UnmergeRows
from jaxtrain.transforms.precision import KERNEL, Policy, autocast, autocast_disabled, kernel, low_precision, policy
from jaxtrain.transforms.remat import BLOCK, block, remat
from jaxtrain.transforms.unroll import unroll

__all__ = [
    "BLOCK",
    "KERNEL",
    "Hook",
    "Policy",
    "UnmergeRows",
    "add_hooks",
    "autocast",
    "autocast_disabled",
    "biased_products",
    "block",
    "hook",
    "jax_internals",
    "jaxpr",
    "kernel",
    "low_precision",
    "policy",
    "precision",
    "remat",
    "unroll",
]
