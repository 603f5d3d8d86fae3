"""Cases in both frameworks in float64: totals, weights, gradients and new buffers of one batch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity.case import Case
from parity.oracle.compiled import jit
from parity.oracle.in_torch import InFloat64
from parity.sides import jax_side
from parity.sides.torch_side import in_dtype, seeded_model, tensor


def in_pytorch(case: Case) -> tuple[Any, Any]:
    """Return JAX's arguments, and PyTorch's total, weight, gradients and new buffers."""
    batch = {name: x.astype(float) if x.dtype == np.float32 else x for name, x in case.batch(0, case.rows).items()}
    with seeded_model(case, 0) as model:
        in_dtype(case, model, torch.float64)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = {name: x.numpy(force=True).copy() for name, x in own.items()}
        with InFloat64():
            total, weight = case.torch_loss(model, {name: tensor(x, "fp64") for name, x in batch.items()})
        total.backward()
        grads = {
            name: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy() for name, p in model.named_parameters()
        }
        buffers = {name: x.numpy().copy() for name, x in model.named_buffers() if name in case.buffer_names}
    params, state = jax_side.from_torch(case, weights)
    return (params, batch, state), (total.item(), float(weight), grads, buffers)


def in_jax(case: Case, given: tuple[Any, Any, Any], graded: bool) -> Any:
    """Return total, weight, gradients and new buffers."""
    params, batch, state = given

    def loss(params: Any) -> Any:
        found, _, *new = case.loss_fn(params, batch, jax.random.key(0), *([] if state is None else [state]))
        return found.total, (jnp.asarray(found.weight, float), new[0] if new else None)

    if graded:
        (total, (weight, new)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return total, weight, grads, new
    total, (weight, new) = loss(params)
    return total, weight, None, new


def distances(cases: Sequence[Case], theirs: Sequence[Any], graded: bool) -> list[float]:
    """Return how far each case is from PyTorch, all in one program, which compiles faster than each by itself."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        program = jit(lambda given: [in_jax(case, of, graded) for case, of in zip(cases, given, strict=True)])
        found = jax.tree.map(np.asarray, program([given for given, _ in theirs]))
    pairs = []
    for case, (total, weight, grads, new), (_, their) in zip(cases, found, theirs, strict=True):
        ours = total, weight, jax_side.to_torch(case, grads) if graded else None, jax_side.buffers(case, new)
        pairs.append((ours, (*their[:2], their[2] if graded else None, their[3])))
    return [max(jax.tree.leaves(jax.tree.map(apart, x, y))) for x, y in pairs]


def apart(x: Any, y: Any) -> float:
    return float(np.nan_to_num(np.abs(x - y).max() / (np.abs(y).max() + 1e-9), nan=np.inf))
