"""The losses of both models in float64, and the perturbations of a tensor whose effects on them are compared."""

import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import Jaxpr

from jaxtrain.program import operations as op
from jaxtrain.program.equations import visit
from jaxtrain.program.rewrite import make_jaxpr
from jaxtrain.step import validated
from parity.case import Case
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64
from parity.record import Tensors, as_pairs
from parity.sides.torch_side import few_threads, in_dtype, seeded_model, tensor

Shape = tuple[int, ...]
MAX_DISTANCE = 1e-6
"""Largest relative distance of two equal changes of a float64 loss."""
DRAWS = frozenset({op.RANDOM_BITS, op.THREEFRY2X32, op.RNG_BIT_GENERATOR})
"""Primitives that draw random numbers."""
NEGLIGIBLE_CHANGE = 1e-9
"""A change of the loss below this part of it counts as none."""


@dataclass(frozen=True)
class Probe:
    """The losses of both models in float64: from PyTorch's tensors by name, and from JAX's (parameters, model
    state); and whether JAX's draws random numbers in evaluation."""

    torch_loss: Callable[[Tensors], float]
    jax_loss: Callable[[Any, Any], float]
    jax_draws: Callable[[], bool]


@contextmanager
def probe_of(case: Case) -> Iterator[Probe]:
    """Yield the losses of both models on the case's first batch, in evaluation mode, without dropout."""
    with seeded_model(case, 0) as model:
        yield _probe_of(case, in_dtype(case, model, torch.float64).eval())


def _probe_of(case: Case, model: torch.nn.Module) -> Probe:
    batch = {name: wide(x) for name, x in case.batch(0, case.rows).items()}
    tensors = {name: tensor(x, "fp64") for name, x in batch.items()}

    def torch_loss(values: Tensors) -> float:
        with torch.no_grad():
            for name, own in model.state_dict().items():
                own.copy_(torch.from_numpy(np.asarray(values[name])))
        with InFloat64(), few_threads(model):
            total, weight = case.torch_loss(model, tensors)
        return total.item() / float(weight)

    def evaluate(params: Any, state: Any) -> Any:
        loss, *_ = in_float64(validated(case.loss_fn))(params, batch, None, state)
        return loss.total / loss.weight

    compute = jit(evaluate)

    def jax_loss(params: Any, state: Any) -> float:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return float(compute(*jax.tree.map(wide, (params, state))))

    def jax_draws() -> bool:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (case.params_like, case.state_like))
            return _draws(make_jaxpr(evaluate)(*jax.tree.map(wide, zeros)).jaxpr)

    return Probe(torch_loss, jax_loss, jax_draws)


def _draws(body: Jaxpr) -> bool:
    """Whether a program draws random numbers."""
    return any(op.of(eqn) in DRAWS for eqn in visit(body))


def relative_distance(ours: float, theirs: float, loss: float) -> float:
    """The relative distance of two changes of `loss`."""
    distance = abs(ours - theirs) / max(abs(ours), abs(theirs), NEGLIGIBLE_CHANGE * abs(loss), 1e-300)
    return distance if np.isfinite(distance) else np.inf


def random_perturbation(seed: str, shape: Shape) -> np.ndarray:
    """Positive random numbers, so that a running variance stays positive."""
    return np.asarray(generator(f"move {seed}").uniform(0.0, 0.3, shape) / np.sqrt(shape[-1] if len(shape) > 1 else 1))


def perturbed(x: np.ndarray, seed: str) -> np.ndarray:
    """Return an array with `random_perturbation` added, to both parts of complex numbers."""
    change = random_perturbation(seed, as_pairs(x).shape)
    return x + (change[..., 0] + 1j * change[..., 1] if np.iscomplexobj(x) else change)


def random_weights(model: torch.nn.Module, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the tensors of a model, those of `names` perturbed: scales of one and biases of zero prove nothing."""
    moved: dict[int, np.ndarray] = {}
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if name in names and (x.is_floating_point() or x.is_complex()):
                moved[id(x)] = perturbed(x.detach().numpy(), f"jitter {name}")
        # Tied parameters are one tensor with several names.
        return {
            name: moved[id(x)] if id(x) in moved else x.detach().numpy().copy()
            for name, x in model.state_dict(keep_vars=True).items()
        }


def generator(seed: str) -> np.random.Generator:
    """Return a generator of random numbers that is seeded by a text."""
    return np.random.default_rng(zlib.crc32(seed.encode()))


def wide(x: Any) -> np.ndarray:
    """Return an array with floating values in float64."""
    return np.asarray(x, np.float64 if np.issubdtype(x.dtype, np.floating) else None)
