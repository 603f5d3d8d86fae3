"""A case: one model in both frameworks, with its loss, batches and optimizer. Data only."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.optimizer import AdamW, Optimizer

if TYPE_CHECKING:
    import torch

    from jaxtrain.interop import NameTable
    from jaxtrain.step import LossFn
    from jaxtrain.torch_import import ImportedModel

Batch = Mapping[str, np.ndarray]
"""Arrays by name, with the rows of the batch on the first axis. Floating ones are converted to float32, so that every
precision computes on the same numbers."""


@dataclass(frozen=True)
class Outputs:
    """What an imported module returns, in both frameworks.

    Attributes:
      in_torch: From (PyTorch's module, batch of tensors by name) to its result.
      in_jax: From (parameters, batch of arrays by name, model state) to the result in evaluation.
      batch: From (seed, rows) to a batch.
      rows: Rows of a batch.
      fixed_rows: Whether batches of fewer rows have no meaning.
    """

    in_torch: "Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], Any]"
    in_jax: Callable[[Any, Mapping[str, Any], Any], Any]
    batch: Callable[[int, int], Batch]
    rows: int
    fixed_rows: bool


@dataclass(frozen=True)
class Case:
    """One training run, defined in both frameworks.

    A check shows most with a learning rate that changes the parameters and a `clip_norm` between the smallest and the
    largest gradient norm: a gradient that is always clipped hides a wrong scale. Where `loss_fn` applies dropout with
    `jax.random.bernoulli`, the PyTorch model must drop the same activations in the same order; it gets the same masks.

    Attributes:
      name: Name in reports.
      torch_model: Creates the PyTorch model in float32; its generator is seeded before.
      torch_loss: From (model, batch of tensors) to (sum of the losses, weight). All micro-batches of an accumulation
        window must have the same weight.
      loss_fn: The JAX loss, as `jaxtrain.train_step` takes it, a sum with the same weight.
      params_like: Pytree with the shapes of the JAX parameters, e.g. of `jax.ShapeDtypeStruct`.
      names: Table from the JAX parameters to PyTorch's; None lets `parity.weights` propose it.
      batch: From (seed, rows) to a batch.
      rows: Rows of an effective batch.
      optimizer: The optimizer of both sides.
      clip_norm: Bound of the global gradient norm; None does not clip.
      state_like: Pytree with the shapes of the JAX model state; None for a model without state.
      buffers: Table from the model state to PyTorch's buffers; None lets `parity.weights` propose it.
      settings: Fields of `parity.settings.Settings` with which a check trains unless it is given others.
      updates: Number of updates of the whole run, of which a check makes the first; None if the run has no length.
      precision: The precision of the run; None if it is no run.
      not_exercised: Lines on the settings of a run that no check of this case uses.
      module: The user's own module, if `torch_model` returns that one. It is set back after every use.
      outputs: What an imported module returns, compared too (`parity.compare.outputs`); None for the loss alone.
      is_large: Whether a step computes so much that its program is worth optimizing.
      turns: Number of updates until each parameter has had one, if several optimizers take turns.
    """

    name: str
    torch_model: "Callable[[], torch.nn.Module]"
    torch_loss: "Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], tuple[torch.Tensor, int]]"
    loss_fn: "LossFn"
    params_like: Any
    names: "NameTable | Any"
    batch: Callable[[int, int], Batch]
    rows: int
    optimizer: AdamW | Optimizer
    clip_norm: float | None
    state_like: Any = None
    buffers: "NameTable | None" = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    updates: int | None = None
    precision: str | None = None
    not_exercised: tuple[str, ...] = ()
    module: "torch.nn.Module | None" = None
    outputs: Outputs | None = None
    is_large: bool = False
    turns: int = 1

    def __post_init__(self) -> None:
        from jaxtrain.errors import UserError

        if not isinstance(self.rows, int) or self.rows < 1:
            raise UserError(f"rows must be an integer of at least 1, got {self.rows!r}: set rows of {self.name}")
        if not isinstance(self.optimizer, AdamW | Optimizer):
            kind = type(self.optimizer).__name__
            raise UserError(f"optimizer is a {kind}: use parity.AdamW(…) or parity.Optimizer(…)")

    @classmethod
    def of_import(
        cls,
        name: str,
        model: "ImportedModel",
        *,
        torch_model: "Callable[[], torch.nn.Module]",
        torch_loss: "Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], tuple[torch.Tensor, int]]",
        loss_fn: "LossFn",
        batch: Callable[[int, int], Batch],
        rows: int,
        optimizer: AdamW | Optimizer,
        clip_norm: float | None = None,
        module: "torch.nn.Module | None" = None,
        outputs: Outputs | None = None,
    ) -> "Case":
        """Return the case of an imported module, beside the module itself.

        Args:
          name: Name in reports.
          model: The imported module. Its names are PyTorch's, so that the case needs no tables.
          torch_model: As the attribute.
          torch_loss: As the attribute.
          loss_fn: As the attribute, for example from `model.loss`.
          batch: As the attribute.
          rows: As the attribute.
          optimizer: As the attribute.
          clip_norm: As the attribute.
          module: As the attribute.
          outputs: As the attribute.

        Returns:
          The case.
        """
        return cls(
            name=name,
            torch_model=torch_model,
            torch_loss=torch_loss,
            loss_fn=loss_fn,
            batch=batch,
            params_like=model.params,
            names=model.names,
            rows=rows,
            optimizer=optimizer,
            clip_norm=clip_norm,
            state_like=model.state,
            buffers=model.state_names,
            module=module,
            outputs=outputs,
        )

    @property
    def has_tables(self) -> bool:
        """Whether the case names all its tables."""
        return self.names is not None and (self.buffers is not None or self.state_like is None)

    @property
    def tables(self) -> "tuple[NameTable, NameTable | None]":
        """The tables of the parameters and of the buffers; None for a model without state.

        Raises:
          ValueError: A table was left out: `parity.weights.with_tables` proposes it.
        """
        if not self.has_tables:
            raise ValueError(f"{self.name} has no name table: pass the case through parity.weights.with_tables")
        return self.names, self.buffers

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Names of PyTorch's buffers that have a counterpart in the JAX model state; none before there are tables."""
        table = self.buffers if self.has_tables else None
        return () if table is None else tuple(table.torch_order(self.state_like))

    def torch_optimizer(self, model: "torch.nn.Module") -> "torch.optim.Optimizer":
        """Return PyTorch's optimizer of a model's parameters; raise `UserError` if it refuses a hyperparameter."""
        from jaxtrain.errors import UserError

        try:
            return self._torch_optimizer(list(model.named_parameters()))
        except ValueError as error:
            raise UserError(f"PyTorch refuses the optimizer of {self.name}: {error}") from error

    def _torch_optimizer(self, named: list[Any]) -> "torch.optim.Optimizer":
        if isinstance(self.optimizer, AdamW) or not self.optimizer.by_path:
            return self.optimizer.torch(named)
        table, _ = self.tables
        paths = {name: path for path in table.params for name in table.only([path]).torch_order(self.params_like)}
        paths |= {alias: paths[name] for alias, name in table.tied.items() if name in paths}
        return self.optimizer.torch(named, paths)

    def of_one_batch(self, accumulate: int) -> "Case":
        """Return the case whose batches an operation is located in; a model for one size of batches has micro-batches.

        Args:
          accumulate: Number of micro-batches of a batch.
        """
        del accumulate
        return self

    def batches_like(self, seed: int, steps: int, rows: int) -> Iterator[Batch]:
        """Yield a batch of some rows for each step, with the shapes of its batch; they may be one batch."""
        yield from itertools.repeat(self.batch(seed, rows), steps)

    def batches(self, seed: int, steps: int) -> Iterator[Batch]:
        """Yield an effective batch for each step; the same batches for the same seed."""
        for step in range(steps):
            yield self.batch(int(np.random.SeedSequence([seed, step]).generate_state(1)[0]), self.rows)
