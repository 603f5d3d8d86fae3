"""In every precision attention is at most twice as far from the float64 truth as PyTorch's, with all gradients."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.models.attention_programs import B, N, Program, drawn, evaluated
from tests.models.explicit_attention import eager
from tests.models.test_attention_references import sdpa

T, S = 48, 80
SIZES = Program(t=T, s=S, width=16, value_width=16, blocks=(16, 32))
PROGRAMS = {
    "plain": SIZES,
    "causal": SIZES._replace(causal=True, heads=1),
    "padding": SIZES._replace(mask=(B, 1, 1, S), heads=4),
    "bias": SIZES._replace(bias=(1, N, T, S), scale=1.0),
    "packed": SIZES._replace(segments=B, causal=True, window=17),
    "softcap": SIZES._replace(softcap=5.0, causal=True),
    "sinks": SIZES._replace(sinks=True, causal=True, window=17),
    "dropout": SIZES._replace(dropout=0.2, bias=(B, 1, 1, S)),
    "everything": SIZES._replace(
        **{"bias": (1, N, T, S), "mask": (B, 1, T, S), "segments": B, "sinks": True},
        **{"causal": True, "window": 29, "softcap": 5.0, "scale": 0.4, "dropout": 0.2},
    ),
}
EAGER = {"softcap", "sinks", "dropout", "everything"}
"""Programs with options that `scaled_dot_product_attention` lacks."""


def pytorchs(given, cotangent, dtype):
    """Return the output and the gradients of `scaled_dot_product_attention`, computed in a dtype."""
    tensors = {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in given.trained.items()}
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
    out = sdpa(given, q, k, v, tensors.get("bias")).transpose(1, 2)
    grads = torch.autograd.grad(out, [*tensors.values()], torch.tensor(cotangent, dtype=dtype))
    return {name: x.detach().double().numpy() for name, x in zip(("out", *tensors), (out, *grads), strict=True)}


def ratios(name, blocks, dtype, seeds):
    """Return the root mean square distances from the truth over PyTorch's, by array."""
    program, low, errors = PROGRAMS[name]._replace(blocks=blocks), jnp.dtype(dtype), []
    theirs_of = eager if name in EAGER else pytorchs
    for seed in seeds:
        given, cotangent = drawn(program, seed, low)
        rounded = {what: x.astype(low).astype(np.float64) for what, x in given.trained.items()}
        given, cotangent = given._replace(**rounded), cotangent.astype(low).astype(np.float64)
        truth, theirs = eager(given, cotangent), theirs_of(given, cotangent, getattr(torch, dtype))
        ours = evaluated(program, given, cotangent, seed, low)
        errors.append({what: (ours[what] - y, theirs[what] - y) for what, y in truth.items()})
    found = {}
    for what in errors[0]:
        own, other = (np.concatenate([e[what][side].ravel() for e in errors]) for side in range(2))
        found[what] = np.sqrt(np.mean(own**2) / np.mean(other**2))
    return found


ALL = [*product(PROGRAMS, ("blocks", "formula"), ("float32", "bfloat16", "float16"))]


@pytest.mark.parametrize(
    ("name", "path", "dtype"),
    ALL,
)
def test_attention_is_at_most_twice_as_far_from_the_truth_as_pytorchs(name, path, dtype):
    found = ratios(name, SIZES.blocks if path == "blocks" else None, dtype, range(6))
    assert max(found.values()) <= 2, found
