"""JAX's side: the step of a port, which the harness runs as it is written or in float64."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from parity.case import Batch, Case
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64, rounding_errors
from parity.progress import report
from parity.record import Record, Snapshot, Tensors
from parity.sides import torch_side
from parity.sides.jax_side import arrays, exactly
from parity.verify.contract import Target
from parity.verify.raised import raised_by_user
from parity.verify.source_case import state_dict

Watch = Callable[[float, Snapshot], None]
"""Called after each update with its loss and the tensors after it."""


class PortProgram:
    """The step of a port, compiled once; in the place of `parity.sides.jax_side.Program`.

    Args:
      target: The port.
      precision: "fp64", in which all arithmetic of the step is in float64 whatever it requests, or "fp32", in which it
        is as written.
      step: A step in the place of the port's.
    """

    def __init__(self, target: Target, precision: str, step: Callable[..., Any] | None = None) -> None:
        self.target, self.precision = target, precision
        self._given = step or target.step
        self._step = jit(self._exact) if self._is_exact else jax.jit(self._given)

    @property
    def _is_exact(self) -> bool:
        return self.precision == "fp64"

    def _exact(self, state: Any, batch: Any, errors: jax.Array) -> Any:
        return in_float64(self._given, errors)(state, batch)

    def first_state(self, case: Case, seed: int) -> Any:
        """Return the state that the port makes of the source's weights."""
        weights = state_dict(case, seed)
        with jax.enable_x64(self._is_exact):
            state = self.target.init({name: x.copy() for name, x in weights.items()})
            return jax.tree.map(partial(_exactly, weights), state) if self._is_exact else state

    def refusal(self, case: Case, seed: int) -> str | None:
        """Return why the step cannot be computed in float64; None if it can."""
        try:
            with jax.enable_x64(True):
                state = self.first_state(case, seed)
                jax.eval_shape(in_float64(self._given), state, port_batch(next(case.batches(seed, 1)), "fp64"))
        except UserError as error:
            return str(error)
        except Exception as error:  # of a step that is not written for float64
            raised = raised_by_user(error)
            if raised is None:
                raise
            return f"{raised.line} raises {raised.what}"
        return None

    def run(
        self,
        case: Case,
        weights: Tensors,
        *,
        steps: int,
        seed: int,
        nudge: int | None = None,
        watch: Watch | None = None,
    ) -> Record:
        """Train from the source's weights.

        Args:
          case: The source.
          weights: Not used: a port begins with all tensors of the model, drawn from the same seed.
          steps: Updates.
          seed: Seed of weights and data.
          nudge: As of `Program.run`.
          watch: Called after each update.

        Returns:
          The record of the run. Its gradients are PyTorch's own if the contract names none: they are not compared.
        """
        del weights
        report(f"{self.precision}: JAX compiles")
        with jax.enable_x64(self._is_exact):
            state, losses, first = self.first_state(case, seed), [], None
            errors = [rounding_errors(nudge)] if self._is_exact else []
            for number, batch in enumerate(case.batches(seed, steps), start=1):
                given = port_batch(batch, self.precision)
                if first is None:
                    grads = self._gradients(case, state, given, seed)
                else:
                    report(f"{self.precision}: JAX, update {number} of {steps}")
                state, loss = self._step(state, given, *errors)
                losses.append(float(loss))
                if first is None or watch is not None:
                    after = self.snapshot(case, state)
                    first = first or after
                    if watch is not None:
                        watch(losses[-1], after)
            last = self.snapshot(case, state)
        assert first is not None
        return Record(np.array(losses), grads, first, last, np.ones(steps + 1), np.full(steps, np.nan))

    def snapshot(self, case: Case, state: Any) -> Snapshot:
        """Return the tensors of a state by PyTorch's names."""
        found = _read(self.target.weights(state))
        names = set(case.buffer_names)
        return Snapshot({name: found[name] for name in case.params_like}, {}, {name: found[name] for name in names})

    def _gradients(self, case: Case, state: Any, batch: Any, seed: int) -> Tensors:
        if self.target.gradients is None:
            return torch_side.run(case, self.precision, steps=1, seed=seed).grads
        function = self.target.gradients
        found = _read((in_float64(function) if self._is_exact else function)(state, batch))
        return {name: found[name] for name in case.params_like}


def port_batch(batch: Batch, precision: str) -> dict[str, jax.Array]:
    """Return a batch as a port is given it: floating arrays in the precision, integers in at most 32 bits, as JAX has
    them by default, and others, such as masks, as they are."""
    wide = {name: x for name, x in batch.items() if x.dtype.kind in "fc" or x.dtype.itemsize > 4}
    return {name: jnp.asarray(x) for name, x in batch.items()} | arrays(wide, precision)


def _exactly(weights: Tensors, x: Any) -> jax.Array:
    """A leaf of a state in float64: a scalar as it was written, such as a learning rate, unless it is a weight."""
    leaf = jnp.asarray(x)
    is_weight = any(w.shape == () and w == x for w in weights.values()) if leaf.shape == () else True
    return leaf.astype(np.float64) if is_weight and leaf.dtype == np.float32 else exactly(leaf)


def _read(tensors: Mapping[str, Any]) -> Tensors:
    return {name: np.array(x) for name, x in tensors.items()}
