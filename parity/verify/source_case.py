"""PyTorch's side: the source file as a case, which the harness trains in every precision."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from jaxtrain import Loss
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Batch, Case
from parity.optimizer import Optimizer
from parity.record import Tensors
from parity.sides.nonfinite_loss import cause_of_nonfinite
from parity.sides.randomness import Draws
from parity.sides.torch_side import seeded_model, tensor
from parity.verify.contract import Source


@dataclass(frozen=True)
class SourceCase(Case):
    """The source file as a case. Its JAX side has PyTorch's names, and no program.

    Attributes:
      source: The source file.
      required: Names that `weights` of a port must return: the parameters, and the buffers that training changes.
      notes: Lines on what is not compared, and on what a verdict rests on.
      rate: Factor of the learning rate of every update.
    """

    source: Source | None = None
    required: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rate: float = 1.0

    def most(self, updates: int) -> int:
        """Return a number of updates, or that of the whole run if it has fewer."""
        return updates if self.updates is None else min(updates, self.updates)

    def torch_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the source's optimizer of a model."""
        assert self.source is not None
        made = self.source.optimizer(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise _wrong(self.source, "optimizer", f"returned {type(made).__name__}: return a torch.optim.Optimizer")
        if self.rate != 1:
            _scale_rates(made, self.rate)
        return made


def source_case(source: Source, seed: int) -> SourceCase:
    """Return the case of a source file.

    Args:
      source: The file.
      seed: Seed of the weights and the batch on which it is called once.

    Raises:
      UserError: A function returns something else than the contract says.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _module(source)
    model, batch = model if model.training else model.train(), _batch(source, seed)
    notes = _check_batches(source, batch, seed)
    before = {name: x.clone() for name, x in model.named_buffers()}
    _check_loss(source, model, batch)
    params = {name: _like(p) for name, p in model.named_parameters()}
    saved = model.state_dict()
    changing = {name: _like(x) for name, x in model.named_buffers() if _changed(before[name], x)}
    buffers = {name: like for name, like in changing.items() if name in saved}
    case = SourceCase(
        name=source.file.name,
        torch_model=partial(_module, source),
        torch_loss=lambda model, batch: (source.loss(model, batch), 1),
        loss_fn=_no_program,
        params_like=params,
        names=_as_named(params),
        batch=lambda seed, rows: _batch(source, seed, rows),
        rows=len(next(iter(batch.values()))),
        optimizer=Optimizer(
            source.file.name,
            _no_program,
            _no_program,
            scheduler=None if source.scheduler is None else partial(_Scheduler, source),
        ),
        clip_norm=source.clip_norm,
        updates=source.updates,
        state_like=buffers or None,
        buffers=_as_named(buffers) if buffers else None,
        source=source,
        required=(*params, *buffers),
        notes=(
            *notes,
            *(f"{name} is not compared: it is not in the state_dict" for name in changing if name not in saved),
        ),
    )
    optimizer = case.torch_optimizer(model)
    if case.optimizer.scheduler is not None:
        case.optimizer.scheduler(optimizer)
    return case


def _check_batches(source: Source, batch: Batch, seed: int) -> list[str]:
    """Refuse batches that are others for the same seed; return a note if they are the same for another."""
    again, other = _batch(source, seed), _batch(source, seed + 1)
    for name in batch:
        if not _equal(batch, again, name):
            what = f"returned two arrays {name!r} for one seed: draw from a generator of the seed"
            raise _wrong(source, "batch", what)
    is_fixed = all(_equal(batch, other, name) for name in batch)
    return ["the batch is the same for every seed: the author of a port could know it"] if is_fixed else []


def _equal(one: Batch, other: Batch, name: str) -> bool:
    return np.array_equal(one[name], other.get(name, ()), equal_nan=one[name].dtype.kind in "fc")


def _check_loss(source: Source, model: torch.nn.Module, batch: Batch) -> None:
    with Draws() as draws:
        loss = source.loss(model, {name: tensor(x, "fp32") for name, x in batch.items()})
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise _wrong(source, "loss", f"returned {found}: return a scalar tensor that depends on the parameters")
    if draws.drawn:
        raise _wrong(source, "loss", "draws random numbers, as dropout does: set its rate to 0 in the model")
    if not torch.isfinite(loss):
        raise _wrong(source, "loss", f"returned {loss.item()}: {cause_of_nonfinite(batch)}")


def state_dict(case: Case, seed: int) -> Tensors:
    """Return all tensors of the model that is drawn from a seed, which a port begins with."""
    with seeded_model(case, seed) as model:
        return {name: x.detach().numpy().copy() for name, x in model.state_dict().items()}


class _Scheduler:
    """The source's scheduler. One that has an end, as that of a cycle, refuses to step beyond it."""

    def __init__(self, source: Source, optimizer: torch.optim.Optimizer) -> None:
        assert source.scheduler is not None
        self._source, self._own, self._count = source, source.scheduler(optimizer), 0
        if not hasattr(self._own, "step"):
            raise _wrong(source, "scheduler", f"returned {type(self._own).__name__}: return what has a step()")

    def step(self) -> None:
        """Step after an update."""
        self._count += 1
        if self._count == self._source.updates:
            return  # no update follows
        try:
            self._own.step()
        except ValueError as error:
            what = f"cannot step after update {self._count}, {error}: give the length of the run as updates in [source]"
            raise _wrong(self._source, "scheduler", what) from error


def _scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rates in each update, whatever a scheduler sets in between."""
    own: list[Any] = []

    def scale(*_: Any) -> None:
        own[:] = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = factor * rate

    def restore(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore)


def _module(source: Source) -> torch.nn.Module:
    made = source.model()
    if not isinstance(made, torch.nn.Module):
        raise _wrong(source, "model", f"returned {type(made).__name__}: return a torch.nn.Module")
    return made


def _batch(source: Source, seed: int, rows: int | None = None) -> Batch:
    batch = source.batch(seed)
    if not isinstance(batch, Mapping) or not batch:
        raise _wrong(source, "batch", f"returned {type(batch).__name__}: return arrays by name")
    for name, x in batch.items():
        if not isinstance(x, np.ndarray) or not x.ndim:
            raise _wrong(source, "batch", f"returned {name!r} as {type(x).__name__}: return an array of rows")
        rows = len(x) if rows is None else rows
        if len(x) != rows or not rows:
            raise _wrong(
                source, "batch", f"returned {len(x)} rows of {name!r} and {rows} elsewhere: return equal numbers"
            )
    return batch


def _wrong(source: Source, key: str, what: str) -> UserError:
    function: Any = getattr(source, key)
    return UserError(f"{getattr(function, '__name__', key)} in {source.file}, the contract's {key}, {what}")


def _changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    return after.is_floating_point() and not torch.equal(before, after)


def _like(x: torch.Tensor) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.float32), tuple(x.shape))


def _as_named(tensors: Mapping[str, Any]) -> NameTable:
    return NameTable({name: TorchParam(name) for name in tensors})


def _no_program(params: Any, batch: Any, rng: Any, *state: Any) -> Any:
    """The place of the JAX loss of a case, which draws no dropout masks: a port is a step as a whole."""
    return Loss(np.zeros(()), 1), {}, *state
