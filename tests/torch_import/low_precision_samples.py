"""PyTorch's own samples of its operations (`op_db`) in float32 and bfloat16, beside the same samples in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain import UserError
from jaxtrain.data import tensor_to_numpy
from jaxtrain.torch_import import from_torch
from parity.bars import FEW_ULPS, RATIO_BAR
from tests.torch_import.samples import Operation, Outcome, chosen_samples, is_complex, tensors_of


def outcomes(info: Any, dtype: torch.dtype) -> Iterator[Outcome]:
    """Yield the outcome of some samples of an entry of `op_db` in a dtype."""
    for sample in chosen_samples(info, dtype, requires_grad=dtype in info.supported_backward_dtypes("cpu")):
        yield outcome(info, sample, dtype)


def outcome(info: Any, sample: Any, dtype: torch.dtype) -> Outcome:
    """Import one sample and compare the distances of both sides from float64, of values and of gradients."""
    module, tensors = Operation.of(info, sample)
    if any(x.layout != torch.strided or x.is_quantized for x in tensors):
        return Outcome("no reference", "a tensor that is not strided")
    arrays = tuple(tensor_to_numpy(x.clone()) for x in tensors)
    for differentiable in ([x.dtype == dtype for x in tensors], [False] * len(tensors)):
        try:
            truth = _of_pytorch(module, [_in_float64(x) for x in tensors], differentiable)
            theirs = _of_pytorch(module, tensors, differentiable)
            break
        except Exception as error:
            reason = str(error)[:80]
    else:
        return Outcome("no reference", reason)
    with jax.enable_x64():
        try:
            ours = _imported(module.train(), arrays, differentiable)
        except UserError as error:
            return Outcome("refused", str(error)[:160])
    # Where a gradient is 0, rounding is that of the terms which cancel.
    n_values = len(truth) - sum(differentiable)
    given = [_complex(x) for x, wanted in zip(tensors, differentiable, strict=True) if wanted]
    of_values = max((float(np.abs(_complex(y)).max()) for y in truth[:n_values] if y.numel()), default=0.0)
    of_terms = [0.0] * n_values + [of_values / max(float(np.abs(x).max(initial=0)), 1.0) for x in given]
    return _judged(ours, theirs, truth, of_terms)


def _in_float64(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x.to(torch.complex128) if x.is_complex() else x


def _of_pytorch(module: torch.nn.Module, tensors: Any, differentiable: list[bool]) -> list[torch.Tensor]:
    """Return PyTorch's values and gradients."""
    given = [x.detach().clone().requires_grad_(wanted) for x, wanted in zip(tensors, differentiable, strict=True)]
    values = tensors_of(module(*given))
    if not values:
        raise ValueError("the result is a Python number")
    floats = [x for x in given if x.requires_grad]
    loss = _loss([y for y in values if y.is_floating_point() or y.is_complex()], torch)
    grads: Any = [None] * len(floats)
    if floats and getattr(loss, "requires_grad", False):
        grads = torch.autograd.grad(loss, floats, allow_unused=True)
    return [y.detach() for y in values] + [
        torch.zeros_like(x) if g is None else g for x, g in zip(floats, grads, strict=True)
    ]


def _imported(module: torch.nn.Module, arrays: Any, differentiable: list[bool]) -> list[jax.Array]:
    """Return the values and gradients of the imported module."""
    model = from_torch(module, arrays)

    def run(floats: Any) -> Any:
        given = iter(floats)
        batch = tuple(next(given) if wanted else x for x, wanted in zip(arrays, differentiable, strict=True))
        leaves = jax.tree.leaves(model({}, batch, jax.random.key(0), model.state)[0])
        outputs = [y for y in leaves if isinstance(y, jax.Array)]
        return _loss([y for y in outputs if jnp.issubdtype(y.dtype, jnp.inexact)], jnp), outputs

    floats = tuple(jnp.asarray(x) for x, wanted in zip(arrays, differentiable, strict=True) if wanted)
    # An excess of precision on a CPU would hide where a formula rounds.
    exact = {"xla_allow_excess_precision": False}
    (_, values), grads = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=exact)(floats)
    return [*values, *grads]


def _loss(values: Any, numpy: Any) -> Any:
    """Return a float64 scalar with slopes that bfloat16 represents."""
    loss = 0.0
    for y in values:
        for part in (y.real, y.imag) if is_complex(y, numpy) else (y,):
            slopes = np.round(64 * np.cos(np.arange(1.0, 1.0 + np.prod(part.shape)))).reshape(part.shape) / 64
            loss += ((part.astype(np.float64) if numpy is jnp else part.double()) * numpy.asarray(slopes)).sum()
    return loss


def _judged(
    ours: list[jax.Array], theirs: list[torch.Tensor], truth: list[torch.Tensor], of_terms: list[float]
) -> Outcome:
    if len(ours) != len(theirs):
        return Outcome("wrong", f"{len(ours)} results for {len(theirs)}")
    for i, (a, b, t, of_term) in enumerate(zip(ours, theirs, truth, of_terms, strict=True)):
        if a.dtype.name != str(b.dtype).removeprefix("torch.") or a.shape != b.shape:
            return Outcome("wrong", f"result {i} is {a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}")
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            if not np.array_equal(a, b.numpy(force=True)):
                return Outcome("wrong", f"result {i} differs")
            continue
        x, y, z = np.asarray(a).astype(np.complex128), _complex(b), _complex(t)
        if not (np.array_equal(np.isnan(x), np.isnan(y)) and np.array_equal(np.isinf(x), np.isinf(y))):
            return Outcome("wrong", f"NaN or infinities of result {i} differ")
        finite = np.isfinite(y) & np.isfinite(z)
        scale, ours_apart, theirs_apart = (float(np.linalg.norm(v[finite])) for v in (z, x - z, y - z))
        if ours_apart > RATIO_BAR * max(theirs_apart, FEW_ULPS * (scale or of_term)):
            detail = f"result {i} is {ours_apart:.1e} from float64, PyTorch's {theirs_apart:.1e}, its norm {scale:.1e}"
            return Outcome("wrong", detail)
    return Outcome("passed")


def _complex(x: torch.Tensor) -> np.ndarray:
    values: np.ndarray = x.detach().to(torch.complex128).resolve_conj().resolve_neg().numpy(force=True)
    return values
