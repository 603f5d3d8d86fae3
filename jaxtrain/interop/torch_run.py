"""Import of a PyTorch run with its weights, moments, counts, schedules and loss scale, and export back.

    checkpoint = read_torch("checkpoint.pt")
    run = torch_run(checkpoint, names, params_like)
    step = jaxtrain.train_step(loss_fn, run.optimizer(), precision="fp16", loss_scale=run.loss_scale())
    state = run.state(step)                               # continues where PyTorch stopped
    write_torch("onward.pt", to_torch(state, run.metadata, run.expression, names))

Schedules count applied updates, as a PyTorch loop that steps its scheduler after every update that the GradScaler did
not skip. Data order and random numbers are not converted.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.interop import optimizer_state
from jaxtrain.interop.bitsandbytes import with_stored_blocks
from jaxtrain.interop.metadata import CheckpointMetadata
from jaxtrain.interop.names import NameTable, require_floating
from jaxtrain.interop.torch_file import TorchCheckpoint, strip_prefixes
from jaxtrain.interop.torch_optimizer import (
    optimizer_class_of_state,
    optimizer_expression,
    scheduler_from_state,
    unread_of_scheduler,
)
from jaxtrain.interop.torch_schedule import advance_schedule
from jaxtrain.optim import OPTIMIZERS, Call, Expression, PlateauState, build_expression
from jaxtrain.records import Record, report_unread
from jaxtrain.step import LossScaleState, TrainState, TrainStep, applied_updates, is_scaled, load_state_dict

_LISTED = 10


@dataclass(frozen=True)
class TorchRun:
    """A PyTorch run, read from a checkpoint.

    Attributes:
      checkpoint: The checkpoint.
      names: Name table of the parameters.
      params_like: Parameters, of which only shapes and dtypes are used.
      expression: Optimizer, or None.
      metadata: Contents of the checkpoint besides tensors.
      buffers: Name table of the running statistics.
      state_like: Running statistics, of which only shapes and dtypes are used, or None.
    """

    checkpoint: TorchCheckpoint
    names: NameTable
    params_like: Any
    expression: Expression | None
    metadata: CheckpointMetadata
    buffers: NameTable = field(default_factory=lambda: NameTable({}))
    state_like: Any = None

    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """Return the gradient transformation. Raises `UserError` for a checkpoint without an optimizer."""
        if self.expression is None:
            raise UserError("the checkpoint has no optimizer: choose one to start a new run from its weights")
        with _state_dict_errors():
            return build_expression(self.expression, OPTIMIZERS, {})

    def loss_scale(self) -> optax.GradientTransformation | None:
        """Return the loss scale of the GradScaler; None without one or if it was disabled."""
        with _state_dict_errors():
            return load_state_dict(self.checkpoint.scaler) if self.checkpoint.scaler else None

    def state(self, step: TrainStep, *, accumulate: int = 1, seed: int = 0) -> TrainState:
        """Return the training state from which the run continues.

        Leaves are read and converted one by one.

        Args:
          step: Training step.
          accumulate: Number of micro-batches of a window.
          seed: Seed of the random numbers to come.

        Raises:
          UserError: Something does not fit, or a number would be rounded.
        """
        with _state_dict_errors():
            return self._state(step, accumulate, seed)

    def _state(self, step: TrainStep, accumulate: int, seed: int) -> TrainState:
        def zeros() -> tuple[Any, Any]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (self.params_like, self.state_like))

        def small() -> TrainState:
            params, model_state = zeros()
            fresh = step.init(params, model_state=model_state, seed=seed)
            return fresh._replace(params=None, model_state=None, opt_state=None, ema=None)

        params_like, state_like = jax.eval_shape(zeros)
        like = jax.eval_shape(lambda p, s: step.init(p, model_state=s, seed=seed), params_like, state_like)
        if like.ema is not None:
            raise UserError("the step has an EMA, which checkpoints do not contain: use ema=None")
        params, model_state = self._tensors(like)
        count = self.metadata.count
        if self.expression is None or not count:
            # Donated, so that parameters that init copies do not exist twice.
            init = jax.jit(lambda p, s: step.init(p, model_state=s, seed=seed), donate_argnums=(0, 1))
            state: TrainState = init(params, model_state)
        else:
            state = jax.jit(small)()._replace(params=params, model_state=model_state, opt_state=self._opt_state(like))
        return state._replace(
            step=jnp.array(count, np.int32),
            micro_step=jnp.array(count * accumulate, np.int32),
            loss_scale=self._loss_scale_state(state.loss_scale),
        )

    def _tensors(self, like: TrainState) -> tuple[Any, Any]:
        params, buffers = _split_buffers(self.checkpoint.model, self.buffers, self.state_like)
        model_state = None if self.state_like is None else self.buffers.to_jax(buffers, like.model_state, _put)
        return self.names.to_jax(params, like.params, _put), model_state

    def _opt_state(self, like: TrainState) -> Any:
        assert self.expression is not None
        assert self.checkpoint.optimizer is not None
        entries = optimizer_state.state_by_name(self.checkpoint.optimizer, self.metadata.group_names)
        return optimizer_state.to_jax(
            like.opt_state,
            self.expression,
            self.metadata.count,
            entries,
            self.names,
            put=_put,
            plateaus=self._plateaus(),
        )

    def _plateaus(self) -> list[PlateauState]:
        saved = self.metadata.scheduler
        if saved is None or "num_bad_epochs" not in saved:
            return []
        dtype = jnp.result_type(float)
        best = jnp.asarray(saved["best"], dtype)
        bad, cooldown = (jnp.asarray(saved[name], np.int32) for name in ("num_bad_epochs", "cooldown_counter"))
        rates = [jnp.asarray(float(group["lr"]), dtype) for group in self.metadata.param_groups]
        return [PlateauState(rate, rate, best, bad, cooldown) for rate in rates]

    def _loss_scale_state(self, fresh: Any) -> Any:
        scaler = self.loss_scale()
        if scaler is None:
            return fresh
        if not isinstance(fresh, LossScaleState) or fresh.blocks is not None:
            raise UserError("the checkpoint has a GradScaler state but the step no loss scale: pass loss_scale=")
        return scaler.init(None)


def torch_run(
    checkpoint: TorchCheckpoint,
    names: NameTable,
    params_like: Any,
    *,
    buffers: NameTable | None = None,
    state_like: Any = None,
    kind: str | None = None,
    schedule: Call | None = None,
    updates: int | None = None,
) -> TorchRun:
    """Read a PyTorch run from a checkpoint.

    Args:
      checkpoint: Checkpoint.
      names: Name table of the parameters.
      params_like: Parameters, of which only shapes and dtypes are used.
      buffers: Name table of the running statistics, of a model with BatchNorm.
      state_like: Running statistics, of which only shapes and dtypes are used.
      kind: Class of the optimizer, if the checkpoint does not determine it.
      schedule: Schedule of the learning rate, if the checkpoint does not determine it.
      updates: Number of updates, if the checkpoint does not determine it.

    Raises:
      UserError: Something is missing, does not fit or is not supported; it is named.
    """
    buffers = buffers or NameTable({})
    params, state = _split_buffers(checkpoint.model, buffers, state_like)
    require_floating(names.stored(params, params_like), params_like)
    if state_like is not None:
        buffers.check(state, state_like)
    with _state_dict_errors():
        reader = _CheckpointReader(checkpoint, names, params_like, kind, schedule, updates)
        expression, metadata = reader.expression(), reader.metadata()
    return TorchRun(checkpoint, names, params_like, expression, metadata, buffers, state_like)


@contextlib.contextmanager
def _state_dict_errors() -> Iterator[None]:
    """Raise errors that invalid entries of a `state_dict()` cause in the body of the `with` as `UserError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"the optimizer, scheduler or scaler of the checkpoint is not as torch writes it ({why}): save it again"
        ) from error


class _CheckpointReader:
    """Reader of the optimizer and the metadata of a checkpoint."""

    def __init__(
        self,
        checkpoint: TorchCheckpoint,
        names: NameTable,
        params_like: Any,
        kind: str | None,
        schedule: Call | None,
        updates: int | None,
    ) -> None:
        self.checkpoint, self.names, self.schedule, self.params_like = checkpoint, names, schedule, params_like
        self.groups: list[dict[str, Any]] = []
        self.group_names: list[list[str]] = []
        self.entries: optimizer_state.Entries = {}
        self.count = 0
        if checkpoint.optimizer is None:
            return
        self.groups = checkpoint.optimizer["param_groups"]
        _check_groups(self.groups, checkpoint.optimizer["state"])
        self.trained = set(names.torch_order(params_like))
        shapes = self._shapes()
        self.group_names = optimizer_state.group_parameter_names(checkpoint.optimizer, shapes, self._own_name)
        self.entries = optimizer_state.state_by_name(checkpoint.optimizer, self.group_names)
        self.kind = kind or optimizer_class_of_state(self.groups, {key for of in self.entries.values() for key in of})
        self.count = self._count(updates)

    def expression(self) -> Expression | None:
        """Return the optimizer, None without one."""
        if self.checkpoint.optimizer is None:
            return None
        state = None if self.checkpoint.scheduler is None else Record(self.checkpoint.scheduler)
        saved = None if state is None else scheduler_from_state(state)
        if self.schedule is not None:
            return self._with_schedule(self.schedule)
        if saved is None and any("initial_lr" in group for group in self.groups):
            raise UserError(f"{self.kind} had a scheduler, whose state is not in the checkpoint: set --schedule")
        shift = 0 if saved is None or saved.kind == "ReduceLROnPlateau" else saved.position - self.count
        if shift < 0:
            raise UserError(
                f"the scheduler was stepped {self.count + shift} times in {self.count} updates, probably per epoch, "
                "but schedules count updates: set --schedule in updates"
            )
        found = optimizer_expression(self.kind, self.groups, saved, *self._named(), shift=shift)
        if state is not None:
            report_unread("the scheduler of the checkpoint", unread_of_scheduler(state))
        return with_stored_blocks(found, self.entries, self.names, self.params_like)

    def metadata(self) -> CheckpointMetadata:
        """Return the metadata."""
        steps = [of["step"] for of in self.entries.values() if hasattr(of.get("step"), "dtype")]
        return CheckpointMetadata(
            list(self.checkpoint.model),
            self.groups,
            self.group_names,
            self.checkpoint.scheduler,
            self.checkpoint.scaler,
            self.count,
            self.checkpoint.epoch,
            str(steps[0].dtype) if steps else "float32",
        )

    def _with_schedule(self, schedule: Call) -> Expression:
        momenta = self.checkpoint.scheduler is not None and self.checkpoint.scheduler.get("cycle_momentum")
        if momenta:
            raise UserError("the scheduler cycles the momentum, which --schedule cannot express: leave it out")
        bare = [{k: v for k, v in group.items() if k != "initial_lr"} for group in self.groups]
        found = optimizer_expression(self.kind, bare, None, *self._named())

        def scheduled(call: Call) -> Call:
            return replace(call, arguments={**call.arguments, "learning_rate": schedule})

        found = with_stored_blocks(found, self.entries, self.names, self.params_like)
        if isinstance(found, Call):
            return scheduled(found)
        return {paths: scheduled(call) for paths, call in found.items()}

    def _named(self) -> tuple[Any, Any]:
        """Return the table and the names of the groups, or nothing for one group of all parameters."""
        whole = len(self.groups) == 1 and set(self.group_names[0]) == self.trained
        # Muon and Adafactor need the layouts in the table.
        return (None, ()) if whole and self.kind not in ("Muon", "Adafactor") else (self.names, self.group_names)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes in PyTorch's order; a tied parameter is where its first name is."""
        model, shapes = self.checkpoint.model, dict[str, tuple[int, ...]]()
        for name in model:
            own = self.names.tied.get(name, name)
            if own in self.trained:
                shapes.setdefault(own, tuple(model[own].shape))
        return shapes

    def _own_name(self, name: str) -> str:
        bare = strip_prefixes(name, self.trained | set(self.names.tied))
        return self.names.tied.get(bare, bare)

    def _count(self, updates: int | None) -> int:
        if updates is not None:
            return updates
        counted = optimizer_state.update_count(self.entries)
        if counted is not None:
            return counted
        scheduler = self.checkpoint.scheduler
        if self.kind.lower() not in optimizer_state.UNCOUNTED:
            return 0  # the state is empty before the first update
        if scheduler is not None and "num_bad_epochs" not in scheduler:
            return scheduler_from_state(scheduler).position
        if self.checkpoint.step is not None:
            return self.checkpoint.step
        raise UserError(f"the checkpoint does not contain the number of updates of {self.kind}: set --updates")


def to_torch(
    state: TrainState,
    metadata: CheckpointMetadata,
    expression: Expression,
    names: NameTable,
    buffers: NameTable | None = None,
) -> TorchCheckpoint:
    """Convert a training state to a checkpoint that PyTorch's `load_state_dict` reads.

    Without new updates it is equal to the one that was read. After updates PyTorch's scheduler is stepped, for which
    torch must be installed.

    Args:
      state: Training state.
      metadata: Metadata of the run, from its checkpoint or `new_metadata`.
      expression: Optimizer.
      names: Name table of the parameters.
      buffers: Name table of the running statistics.

    Raises:
      UserError: The metadata is of another model.
    """
    count = int(applied_updates(state))
    tensors = names.to_torch(state.params)
    tensors |= {alias: tensors[name] for alias, name in names.tied.items() if name in tensors}
    if buffers is not None and state.model_state is not None:
        held = buffers.to_torch(state.model_state)
        # PyTorch's counts are int64.
        tensors |= {name: x.astype(np.int64) if x.dtype == np.int32 else x for name, x in held.items()}
    if set(tensors) - set(names.tied) != set(metadata.model_names) - set(names.tied):
        raise UserError("the metadata is of another model: use that of this run")
    entries = optimizer_state.to_torch(state.opt_state, expression, count, names, np.dtype(metadata.scalar_dtype))
    groups, scheduler = advance_schedule(metadata, expression, state.opt_state, count)
    pairs = zip(groups, metadata.group_names, strict=True)
    by_number = {
        n: entries[name]
        for group, own in pairs
        for n, name in zip(group["params"], own, strict=True)
        if name in entries
    }
    scaler = metadata.scaler
    if is_scaled(state.loss_scale) and scaler:
        updated = {"scale": float(state.loss_scale.scale), "_growth_tracker": int(state.loss_scale.growth_tracker)}
        scaler = {**scaler, **updated}
    optimizer = {"state": by_number, "param_groups": groups} if groups else None
    model = {name: tensors[name] for name in metadata.model_names}
    return TorchCheckpoint(model, optimizer, scheduler, scaler, count, metadata.epoch)


def _split_buffers(
    model: Mapping[str, Any], buffers: NameTable, state_like: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (parameters, buffers) of a model."""
    own = set() if state_like is None else set(buffers.torch_order(state_like))
    return {k: v for k, v in model.items() if k not in own}, {k: v for k, v in model.items() if k in own}


def _check_groups(groups: Any, state: Mapping[Any, Any]) -> None:
    numbers = []
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list) or "lr" not in group:
            raise UserError("a group of the optimizer has no params and lr: save optimizer.state_dict()")
        numbers += group["params"]
    if len(set(numbers)) != len(numbers):
        raise UserError("a parameter is in two groups of the optimizer: save optimizer.state_dict()")
    if strange := state.keys() - set(numbers):
        listed = ", ".join(sorted(map(str, strange))[:_LISTED])
        raise UserError(f"the optimizer has the state of {listed}, in none of its groups: save optimizer.state_dict()")


def _put(array: np.ndarray, like: Any) -> jax.Array:
    """Return a JAX array with the dtype of `like`. Raises `UserError` if that would round."""
    cast = array.astype(like.dtype)
    if array.dtype != cast.dtype and not np.array_equal(cast.astype(array.dtype), array):
        raise UserError(
            f"{array.dtype} values would be rounded to {cast.dtype}: convert the checkpoint first, or use "
            f"{array.dtype} for the run"
        )
    return jnp.array(cast)
