"""PyTorch's own samples of its operations (`op_db`) at the ends of their domains, compared in float64.

The elements of a sample are replaced by 0, -0, ±1, infinities and NaN, and by equal values. Values and gradients are
compared with a distinct weight on every output element; NaN where PyTorch has NaN.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.torch_import.samples import Operation, Outcome, compared_at, sample_sizes

FINITE = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0)
INFINITE = (np.inf, -np.inf, np.nan)

MATRICES = (
    *("svd", "cholesky", "cholesky_inverse", "cholesky_solve", "lu", "lu_solve", "lu_unpack", "qr", "geqrf"),
    *("logdet", "pinverse", "triangular_solve", "ormqr", "matrix_exp", "linalg."),
)
"""Decompositions: those of singular matrices, or with equal eigenvalues, are not unique."""
FINITE_ONLY = (
    # Products with matrices or windows of zeros, where PyTorch's loops skip an element: 0 * inf is NaN here.
    *(
        "nn.functional.conv",
        "nn.functional.interpolate",
        "nn.functional.upsample",
        "_upsample",
        "nn.functional.adaptive_avg_pool",
    ),
    *("nn.functional.bilinear", "fft.", "nn.functional.grid_sample", "grid_sampler"),
    # Of infinite statistics, by Welford's algorithm.
    *("native_group_norm", "nn.functional.group_norm", "nn.functional.layer_norm", "native_layer_norm"),
    *("std_mean", "var_mean"),
    # Quotients of infinities in PyTorch's backward pass, where the value is infinite.
    *("cumprod", "_softmax_backward_data", "nn.functional.ctc_loss", "logcumsumexp", "nn.functional.soft_margin_loss"),
    *("stft", "bucketize", "searchsorted"),
)
"""Entries that are compared at finite points."""
LEFT_OUT = (
    # XLA's approximations to 1e-9, and poles at which PyTorch's rounding is finite.
    *("polygamma", "special.polygamma", "mvlgamma", "igamma"),
    # At -0 the gradient is -inf in PyTorch's vectorized loop, inf in its last elements; `test_ends` has the others.
    "logit",
    # Conversions of negative and infinite numbers, which C leaves open.
    *("int", "long", "short", "char", "byte"),
)
"""Entries without a law at ends of domains."""
UNORDERED = {"sort", "msort", "argsort", "topk", "kthvalue", "mode"}
"""Entries for which PyTorch leaves open which of equal values is chosen: values are compared."""


def points(tensors: list[torch.Tensor], *, infinite: bool, seed: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the arguments of a sample at ends of domains, with a name for each set."""
    rng = np.random.default_rng(seed)

    def replaced(choose: Any) -> list[torch.Tensor]:
        return [torch.as_tensor(choose(x.numpy())) if x.dtype == torch.float64 else x for x in tensors]

    yield "zeros", replaced(np.zeros_like)
    yield "ones", replaced(np.ones_like)
    yield "probabilities", replaced(lambda x: rng.choice((0.0, 1.0, 0.5), x.shape))
    yield "finite ends", replaced(lambda x: rng.choice(FINITE, x.shape))
    if not infinite:
        return
    yield "infinities", replaced(lambda x: rng.choice((*FINITE, np.inf, -np.inf), x.shape))
    yield "all ends", replaced(lambda x: rng.choice((*FINITE, *INFINITE), x.shape))
    for value in INFINITE:
        yield f"one {value}", replaced(lambda x, value=value: _with_one(x, value, rng))


def _with_one(x: np.ndarray, value: float, rng: np.random.Generator) -> np.ndarray:
    x = x.copy()
    if x.size:
        x.flat[rng.integers(x.size)] = value
    return x


def outcomes(info: Any, *, limit: int = 2, seed: int = 0) -> Iterator[Outcome]:
    """Yield the outcomes of some samples of an entry of `op_db` at ends of their domains."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    if info.name.startswith((*MATRICES, *LEFT_OUT)):
        return
    options = {
        "elementwise": isinstance(info, BinaryUfuncInfo | UnaryUfuncInfo),
        "values_only": info.name in UNORDERED,
    }
    infinite = not info.name.startswith(FINITE_ONLY) and "_polynomial_" not in info.name
    for sample in sample_sizes(info, limit):
        module, tensors = Operation.of(info, sample)
        if any(x.layout != torch.strided or x.is_quantized for x in tensors):
            continue
        if not any(x.dtype == torch.float64 for x in tensors):
            continue
        for name, outcome in compared_at(module, tensors, points(tensors, infinite=infinite, seed=seed), **options):
            yield outcome._replace(detail=f"{[tuple(x.shape) for x in tensors]} {name}: {outcome.detail}")
