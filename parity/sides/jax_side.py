"""A training run through `jaxtrain.train_step`, recorded under PyTorch's names."""

import dataclasses
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain
from jaxtrain.interop import leaves
from jaxtrain.passes import Policy, policy
from jaxtrain.paths import path_name
from jaxtrain.step import TrainStep, as_complex, current_scale
from jaxtrain.torch_import import refuse_beyond_int32
from parity.case import Case
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64, rounding_errors
from parity.oracle.literal import written_number
from parity.oracle.program import program_in_float64
from parity.progress import report
from parity.record import Record, Snapshot, Tensors, added
from parity.settings import fp8_policy, in_double


def run(
    case: Case,
    weights: Tensors,
    precision: str,
    *,
    accumulate: int = 1,
    remat: str = "none",
    steps: int = 20,
    seed: int = 0,
) -> Record:
    """Train in JAX from PyTorch's weights.

    Args:
      case: The case, with its tables.
      weights: Initial weights and buffers by PyTorch's names.
      precision: One of `parity.settings.PRECISIONS`.
      accumulate: Micro-batches per accumulation window.
      remat: Rematerialization policy.
      steps: Windows, each with one optimizer update.
      seed: Seed of data and dropout.

    Returns:
      The record of the run.

    Raises:
      UserError: A tensor or a leaf has no counterpart of its shape.
    """
    return Program(case, precision, accumulate=accumulate, remat=remat).run(case, weights, steps=steps, seed=seed)


class Program:
    """JAX's training step of a case, which is compiled once for any number of runs.

    Args:
      case: The case, with its tables.
      precision: One of `parity.settings.PRECISIONS`.
      accumulate: Micro-batches per accumulation window.
      remat: Rematerialization policy.
    """

    def __init__(self, case: Case, precision: str, *, accumulate: int = 1, remat: str = "none") -> None:
        self.case, self.precision = case, precision
        self._build = partial(
            jaxtrain.train_step,
            optimizer=optax.chain(record_gradients(), case.optimizer.jax),
            precision=policy_of(precision),
            accumulate=accumulate,
            clip_norm=case.clip_norm,
            remat=remat,
        )
        exact = precision == "fp64"
        self._step = self._build(in_float64(case.loss_fn) if exact else case.loss_fn)
        self._exact = jit(self._exact_step, donate_argnums=0, optimized=case.is_large) if exact else None
        self._init = jit(self._step.init)
        if in_double(precision) and not exact:
            self._init = partial(_init_in_float64, self._init)
            self._step.jitted = jit(program_in_float64(self._step.pure), donate_argnums=0)

    def run(self, case: Case, weights: Tensors, *, steps: int, seed: int, nudge: int | None = None) -> Record:
        """Train from PyTorch's weights.

        Args:
          case: The case, or a copy with other batches or, in fp64, another `clip_norm`.
          weights: Initial weights and buffers by PyTorch's names.
          steps: Windows, each with one optimizer update.
          seed: Seed of data and dropout.
          nudge: In fp64, a seed of changes of the loss's float32 constants within their rounding; None for no changes.

        Returns:
          The record of the run.

        Raises:
          UserError: A tensor or a leaf has no counterpart of its shape.
        """
        assert case.loss_fn is self.case.loss_fn
        assert case.optimizer is self.case.optimizer
        # Strict promotion rejects a model's float32 constants in float64.
        with jax.enable_x64(in_double(self.precision)), jax.numpy_dtype_promotion("standard"):
            if self._exact is not None:
                self._step.jitted = partial(self._exact, errors=rounding_errors(nudge), clip_norm=case.clip_norm)
            return self._run(case, weights, steps, seed)

    def _exact_step(self, state: Any, batch: Any, errors: jax.Array, clip_norm: Any) -> Any:
        """The step in float64, as a function of what differs between runs."""
        parts = self._build(in_float64(self.case.loss_fn, errors)).parts
        options = dataclasses.replace(parts.options, clip_norm=clip_norm)
        return TrainStep(parts._replace(options=options)).pure(state, batch)

    def _run(self, case: Case, weights: Tensors, steps: int, seed: int) -> Record:
        report(f"{self.precision}: JAX compiles")
        params, model_state = from_torch(case, weights)
        state = self._init(params, model_state=arrays(model_state, self.precision), seed=seed)
        losses, norms, scales = [], [], [float(current_scale(state.loss_scale))]
        grads, after_first, updates = None, None, 0

        for step, batch in enumerate(case.batches(seed, steps)):
            if step:
                report(f"{self.precision}: JAX, update {step + 1} of {steps}")
            with warnings.catch_warnings():
                # PyTorch's side says what is counted.
                warnings.filterwarnings("ignore", "the weight of the loss counts labels")
                state, metrics = self._step(state, arrays(batch, self.precision))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            scales.append(float(current_scale(state.loss_scale)))
            if updates < case.turns and metrics["applied"]:
                fed, after_first = observe(case, state)
                grads, updates = added(grads, fed), updates + 1

        fed, last = observe(case, state)
        return Record(np.array(losses), grads or fed, after_first or last, last, np.array(scales), np.array(norms))


def policy_of(precision: str) -> str | Policy:
    """Return the policy of a precision: an fp8 policy in float64 has no other low precision than fp8."""
    name = fp8_policy(precision)
    return replace(policy(name), compute_dtype=np.float32) if name and in_double(precision) else precision


def _init_in_float64(init: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the initial state of a program in 32 bits in float64: its numbers as they were written."""
    with jax.enable_x64(False):
        state = init(*args, **kwargs)
    return jax.tree.map(exactly, state)


def exactly(x: jax.Array) -> jax.Array:
    """Return a float32 array in float64, a scalar as it was written (`written_number`); others unchanged."""
    if x.dtype != np.float32:
        return x
    return jnp.float64(written_number(x.item())) if x.ndim == 0 else x.astype(np.float64)


class _Fed(NamedTuple):
    """The gradients that the optimizer last received; NaN before its first update."""

    grads: Any


def record_gradients() -> optax.GradientTransformation:
    """Return a transformation that stores the gradients it passes on, to be chained before an optimizer."""

    def init(params: Any) -> _Fed:
        return _Fed(jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params))

    def update(grads: Any, state: _Fed, params: Any = None) -> tuple[Any, _Fed]:
        del state, params
        return grads, _Fed(grads)

    return optax.GradientTransformation(init, update)


def from_torch(case: Case, weights: Tensors) -> tuple[Any, Any]:
    """Return PyTorch's state_dict as (params, model_state); None for a model without state."""
    table, buffers_table = case.tables
    if buffers_table is None:
        return table.to_jax(weights, like=case.params_like), None
    buffers = {name: x for name, x in weights.items() if name in case.buffer_names}
    params = {name: x for name, x in weights.items() if name not in case.buffer_names}
    return table.to_jax(params, like=case.params_like), buffers_table.to_jax(buffers, like=case.state_like)


def arrays(tree: Any, precision: str) -> Any:
    """Return `tree` as JAX arrays: floating and complex ones in 32 bits, or 64 for fp64, others in int32."""
    double = in_double(precision)
    real, complex_ = (np.float64, np.complex128) if double else (np.float32, np.complex64)

    def array(x: Any) -> jax.Array:
        if np.issubdtype(x.dtype, np.complexfloating):
            return jnp.asarray(x, complex_)
        if np.issubdtype(x.dtype, np.floating):
            return jnp.asarray(x, real)
        return jnp.asarray(x, np.int32)

    with jax.enable_x64(False):  # in which integers are int32
        refuse_beyond_int32(tree)
    return jax.tree.map(array, tree)


def observe(case: Case, state: jaxtrain.TrainState) -> tuple[Tensors, Snapshot]:
    """Return the gradients of `record_gradients`, and the state's parameters, moments and buffers."""
    fed, opt_state = state.opt_state
    snapshot = Snapshot(to_torch(case, state.params), moments(case, opt_state), buffers(case, state.model_state))
    return to_torch(case, fed.grads), snapshot


def to_torch(case: Case, tree: Any) -> Tensors:
    """Return parameters, or a pytree of their shape, under PyTorch's names."""
    # Copies: the state is donated to the next step, and NumPy would share its buffers.
    return case.tables[0].to_torch(jax.tree.map(np.array, tree))


def moments(case: Case, opt_state: Any) -> dict[str, Tensors]:
    """Return the optimizer's moments by PyTorch's names of moments and parameters."""
    like = dict(leaves(case.params_like))

    def as_param(path: Any, x: Any) -> Any:
        # jaxtrain's optimizers have pairs of real numbers for complex ones, optax's complex numbers.
        p = like.get(path_name(path), x)
        return as_complex(x, p) if x.shape == (*p.shape, 2) else x

    found = {name: optax.tree.get(opt_state, ours) for name, ours in case.optimizer.moments.items()}
    return {name: to_torch(case, jax.tree.map_with_path(as_param, moment)) for name, moment in found.items()}


def buffers(case: Case, model_state: Any) -> Tensors:
    """Return the model state under PyTorch's names."""
    table = case.tables[1]
    return {} if table is None else table.to_torch(jax.tree.map(np.array, model_state))
