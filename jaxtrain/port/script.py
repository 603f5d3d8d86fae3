"""Runs a PyTorch training script, unmodified, and records its updates.

The script runs as by `python SCRIPT`. What it calls of PyTorch between a batch and `backward` is recorded by
`jaxtrain.port.recorder`; its optimizers, schedulers, scalers, clipping and DataLoaders are observed at their own calls.
A pass over a DataLoader has its first batches and its last one, so that a few updates show what the script does at the
end of an epoch; see `jaxtrain.port.short_passes`.
"""

import contextlib
import hashlib
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from jaxtrain.errors import UserError
from jaxtrain.port.calls import OF_BATCH, Value, tensors_in
from jaxtrain.port.clamps import without_clamps
from jaxtrain.port.joint import Joint, owned, parts_of
from jaxtrain.port.recorder import Recorder, recorded_calls
from jaxtrain.port.recording import Backward, Clip, Leaf, Pass, Recording, Update
from jaxtrain.port.refused import Refused, Stop, refused_at
from jaxtrain.port.short_passes import short_pass
from jaxtrain.torch_import import Line
from jaxtrain.user_file import script_file


def record(
    script: Path, args: Sequence[str], updates: int, progress: Callable[[int], None] = lambda _: None
) -> Recording:
    """Run a script until it has made some updates.

    Args:
      script: The script.
      args: Its arguments.
      updates: Number of updates after which it is stopped.
      progress: Called with the number of updates so far.

    Returns:
      What it did.

    Raises:
      UserError: The script does something that cannot be carried over, or made no update.
    """
    watch = Watch(script, updates, progress)
    watch.recording.is_over, watch.recording.rest = run(script, args, watch), watch.rest
    if not watch.recording.updates:
        raise UserError(f"{script} made no update by an optimizer of PyTorch: give it a training loop that makes one")
    return watch.recording


def made_loaders(script: Path, args: Sequence[str], number: int) -> list[Any]:
    """Run a script until its first pass over a DataLoader.

    Args:
      script: The script.
      args: Its arguments.
      number: Number of the loader, in the order in which the script makes them.

    Returns:
      The loaders that it has made.
    """
    watch = Watch(script, 0, lambda _: None, ends_at=number)
    run(script, args, watch)
    return [found.loader for found in watch.recording.loaders]


def run(script: Path, args: Sequence[str], watch: "Watch") -> bool:
    """Run a script, observed, and return whether it ended by itself."""
    seed_all(0)  # a script without seeds computes something else in every run
    with watch.watching(), _as_main(script, args):
        try:
            if script.is_file():
                runpy.run_path(str(script.resolve()), run_name="__main__")
            else:
                runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        except Refused as end:
            raise end.error from None
        except Stop:
            return False
        except SystemExit as end:
            if end.code not in (None, 0):
                raise UserError(f"{script} ended with the exit status {end.code}: run it by itself first") from None
        except (UserError, BrokenPipeError):  # that of a process whose batches nobody waits for any more
            raise
        except Exception as error:
            traceback.print_exception(error)
            raise _raised(script, error) from None
    return True


def _raised(script: Path, error: Exception) -> UserError:
    """Return the error of a script that raises one, with its line."""
    frames = [Line(x.filename, x.lineno or 0, x.name) for x in traceback.extract_tb(error.__traceback__)]
    line = next((line for line in reversed(frames) if line.file == str(script_file(script))), frames[-1])
    return refused_at(f"{script.name} raised {type(error).__name__}", line, "run it by itself first")


def seed_all(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _as_main(script: Path, args: Sequence[str]) -> Iterator[None]:
    """Give the script its arguments and its folder, as `python SCRIPT` does."""
    with (
        mock.patch.object(sys, "argv", [str(script if script.is_file() else script_file(script)), *args]),
        mock.patch.object(sys, "path", [str(script.resolve().parent), *sys.path]),
    ):
        yield


class Watch:
    """Observes a script.

    Attributes:
      recording: What it has done.
      recorder: Records its calls.
    """

    def __init__(self, script: Path, updates: int, progress: Callable[[int], None], ends_at: int | None = None) -> None:
        self.recording, self.recorder = Recording(), Recorder(str(script_file(script)))
        self._most, self._progress, self._ends_at = updates, progress, ends_at
        self._update = Update()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._leaves: dict[Value, Leaf] = {}
        self._started: dict[int, int] = {}
        self._scaled: dict[int, tuple[torch.Tensor, float]] = {}
        self._unscaled = set[int]()
        self._in_step = contextlib.ExitStack()
        self._joins = False  # whether the step is of the last update, which another optimizer has begun
        self._joints: dict[tuple[int, ...], Joint] = {}

    @property
    def rest(self) -> Update:
        """What the script has done since the last update."""
        return self._update

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe while entered."""
        hooks = (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        )
        self.recorder.on_backward = self.backward
        try:
            with contextlib.ExitStack() as patches:
                for owner, name, function in (
                    *recorded_calls(self.recorder, self.around_module),
                    *self.replacements(),
                ):
                    patches.enter_context(mock.patch.object(owner, name, function))
                patches.enter_context(self.recorder)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is replaced besides, as (owner, name, function)."""
        yield torch, "compile", lambda model=None, **_: (lambda given: given) if model is None else model
        yield torch.autograd, "backward", self._backward_of_several
        yield DataLoader, "__init__", self._made(DataLoader.__init__, self._made_loader)
        yield DataLoader, "__iter__", lambda loader: self._iterate(loader)
        yield torch.optim.Optimizer, "__init__", self._made(torch.optim.Optimizer.__init__, self._made_optimizer)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
                if "step" in vars(kind):
                    yield kind, "step", self._scheduler_step(kind.step)
                if "__init__" in vars(kind):
                    yield kind, "__init__", self._made(kind.__init__, self._made_scheduler)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clipping = self._clipping(name, getattr(torch.nn.utils, name))
            yield torch.nn.utils, name, clipping
            yield torch.nn.utils.clip_grad, name, clipping
        scaler = torch.amp.GradScaler
        yield scaler, "scale", self._scale(scaler.scale)
        yield scaler, "unscale_", self._unscale(scaler.unscale_)
        yield scaler, "step", self._scaler_step(scaler.step)
        yield scaler, "update", self._hidden(scaler.update)
        yield torch.optim.Optimizer, "zero_grad", self._hidden(torch.optim.Optimizer.zero_grad)
        yield torch.nn.Module, "zero_grad", self._hidden(torch.nn.Module.zero_grad)

    def _hidden(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.inside():
                return function(*args, **kwargs)

        return called

    def _made_scheduler(self, scheduler: Any, line: Line) -> None:
        self.recording.schedulers[id(scheduler)] = line

    def _made(self, init: Callable[..., None], note: Callable[[Any, Line], None]) -> Callable[..., None]:
        def made(this: Any, *args: Any, **kwargs: Any) -> None:
            line = self.recorder.line()
            with self.recorder.inside():
                init(this, *args, **kwargs)
            note(this, line)

        return made

    def _made_loader(self, loader: Any, line: Line) -> None:
        self.recording.loaders.append(Pass(loader, line, not self.recording.updates))

    def _made_optimizer(self, optimizer: Any, line: Line) -> None:
        self._optimizers.append(optimizer)
        self.recording.optimizers[id(optimizer)] = line

    def _iterate(self, loader: Any) -> Iterator[Any]:
        number = next((i for i, found in enumerate(self.recording.loaders) if found.loader is loader), -1)
        if number == self._ends_at:
            raise Stop
        with self.recorder.inside():
            batches = self.one_pass(loader)
        while True:
            with self.recorder.inside():
                batch = next(batches, _END)
            if batch is _END:
                self._update.passes.append(number)
                return
            if number >= 0 and number not in self.recording.batches:
                self.recording.batches[number] = batch
            with self.recorder.inside():
                self.recorder.add_batch(x for _, x in tensors_in(batch))
                self._leaves |= {self.recorder.value(x): Leaf(number, key) for key, x in _leaves(batch)}
            yield batch

    def around_module(self, module: torch.nn.Module, call: Callable[[], Any]) -> Any:
        """Call a module; keep what its parameters and buffers are before the first update."""
        has_begun = bool(self.recording.updates or self._update.backwards)
        tensors = [*module.parameters(), *module.buffers()]
        if has_begun:
            tensors = [x for x in tensors if id(x) not in self.recording.start]
        with self.recorder.inside():
            for x in tensors:
                if self._started.get(id(x)) != x._version:
                    self.recording.start[id(x)] = x.detach().clone()
        result = call()
        if torch.is_grad_enabled():  # what it changes itself, such as statistics, is a part of the first update
            self._started |= {id(x): x._version for x in tensors}
        return result

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record the program of a loss, and compute its gradients."""
        line = self.recorder.line()
        keeps = kwargs.pop("retain_graph", None)  # for another call, which changes nothing in this one
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise Refused(refused_at("backward() with arguments", line, "call it without any but retain_graph"))
        if loss.numel() != 1:
            raise Refused(refused_at("backward() of a tensor that is no scalar", line, "reduce the loss to a scalar"))
        unscaled, scale = self._scaled.pop(id(loss), (loss, None))
        with self.recorder.inside():
            self._update.backwards.append(self.program(unscaled, scale, line))
            torch.Tensor.backward(loss, retain_graph=keeps)
        self.recorder.end_interval()
        self.recorder.reads.clear()

    def _backward_of_several(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.recorder.is_inside:
            _run_backward(tensors, *args, **kwargs)
        elif isinstance(tensors, torch.Tensor):
            self.backward(tensors, *args, **kwargs)
        else:
            raise Refused(
                refused_at(
                    "torch.autograd.backward of several tensors", self.recorder.line(), "add them, and call backward()"
                )
            )

    def program(self, loss: torch.Tensor, scale: float | None, line: Line) -> Backward:
        """Return the program of a loss."""
        trained = {id(p) for optimizer in self._optimizers for p in _parameters(optimizer)}
        interval, clamps = without_clamps(self.recorder.interval(loss), trained)
        if self.recording.updates:
            self.recording.updates[-1].clamps |= clamps
        program = interval.program(lambda call: bool(call.origin & OF_BATCH))
        names, numbers = self._variables(interval.identities)
        return Backward(
            interval=interval,
            program=program,
            leaves={value: leaf for value, leaf in self._leaves.items() if value in program.roots},
            names=names,
            numbers=numbers,
            loss=loss.detach().clone(),
            scale=scale,
            line=line,
            reads=tuple(self.recorder.reads),
        )

    def _variables(self, identities: Mapping[Value, int]) -> tuple[dict[Value, str], dict[str, float]]:
        """Return the names of the script's variables that hold tensors, and those of its numbers; keep its modules."""
        names: dict[Value, str] = {}
        numbers: dict[str, float] = {}
        by_id = {key: value for value, key in identities.items()}
        for variables in self.recorder.variables():
            for name, x in variables.items():
                held = {name: x} if isinstance(x, torch.Tensor) else _items(name, x)
                for key, tensor in held.items():
                    if id(tensor) in by_id:
                        names.setdefault(by_id[id(tensor)], key)
                if type(x) is float:
                    numbers.setdefault(name, x)
                if isinstance(x, torch.nn.Module) and not any(x is known for known in self.recording.modules.values()):
                    self.recording.modules.setdefault(name, x)
        return names, numbers

    def one_pass(self, loader: Any) -> Iterator[Any]:
        """Return the batches of a pass over a DataLoader."""
        return short_pass(loader, self._left_out)

    def _left_out(self) -> None:
        self.recording.is_shortened = True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Record the gradients of an update; call a closure that computes them."""
        line = self.recorder.line()
        closure = next((x for x in (*args[1:], *kwargs.values()) if x is not None), None)
        if closure is not None:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise Refused(refused_at("LBFGS.step(closure)", line, "use an optimizer that takes one gradient"))
            with torch.enable_grad():
                loss = closure()
            closure = lambda: loss  # noqa: E731
        self._in_step.enter_context(self.recorder.inside())
        self._joins = not self._update.backwards
        if self._joins:
            self._join(optimizer, line)
        else:
            self._update.optimizer, self._update.line = optimizer, line
        update = self.recording.updates[-1] if self._joins else self._update
        update.settings += _settings(optimizer)
        update.gradients += [self.digest(p.grad) for p in _parameters(optimizer)]
        return (optimizer, *([] if closure is None else [closure])), {}

    def _join(self, optimizer: Any, line: Line) -> None:
        """Note that an optimizer makes the last update as well."""
        last = self.recording.updates[-1] if self.recording.updates else None
        if last is None or last.optimizer is None or owned(optimizer) & owned(last.optimizer):
            problem = f"{type(optimizer).__name__}.step() without backward()"
            raise Refused(refused_at(problem, line, "let backward() compute gradients"))
        if self._update.scale is not None:
            raise Refused(refused_at("several optimizers and a GradScaler", line, "scale no loss"))
        parts = (*parts_of(last.optimizer), optimizer)
        last.optimizer = self._joints.setdefault((*map(id, parts),), Joint(parts))
        last.clips += self._update.clips
        self._update.clips = []

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End an update, or what one of several optimizers does in it."""
        update = self.recording.updates[-1] if self._joins else self._update
        update.after += [self.digest(p) or "" for p in _parameters(optimizer)]
        self._in_step.close()
        if self._joins:
            self._stop_at_end()
        else:
            self._end_update()

    def digest(self, x: torch.Tensor | None) -> str | None:
        """Return a digest of a gradient or a parameter of an update."""
        return digest(x)

    def _end_update(self) -> None:
        self.recording.updates.append(self._update)
        self._update = Update()
        self._leaves = {value: leaf for value, leaf in self._leaves.items() if self.recorder.lives(value)}
        self._scaled.clear()
        self._unscaled.clear()
        self._progress(len(self.recording.updates))
        self._stop_at_end()

    def _stop_at_end(self) -> None:
        """Stop the script if all optimizers have made the last update that is recorded."""
        counts = [len(parts_of(u.optimizer)) for u in self.recording.updates if u.optimizer is not None]
        if len(self.recording.updates) == self._most and (not counts or counts[-1] == max(counts)):
            raise Stop

    def _scheduler_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            line = self.recorder.line()
            if self.recorder.is_inside:  # of its constructor, or of a scheduler that contains it
                return step(scheduler, *args, **kwargs)
            if args or kwargs:
                raise Refused(
                    refused_at(f"{type(scheduler).__name__}.step with arguments", line, "call it without any")
                )
            with self.recorder.inside():
                result = step(scheduler)
            self._update.schedulers.append((scheduler, line))
            return result

        return stepped

    def _clipping(self, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
        def clipped(parameters: Any, bound: Any, *args: Any, **kwargs: Any) -> Any:
            line = self.recorder.line()
            given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            if args:
                kwargs["norm_type"] = args[0]
            found = Clip(name, float(bound), dict(kwargs), tuple(map(id, given)), bool(self._unscaled), line)
            self._update.clips.append(found)
            with self.recorder.inside():
                return clip(given, bound, **kwargs)

        return clipped

    def _scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(scaler: Any, outputs: Any) -> Any:
            if not isinstance(outputs, torch.Tensor):
                raise Refused(refused_at("GradScaler.scale of several tensors", self.recorder.line(), "scale one loss"))
            with self.recorder.inside():
                result = scale(scaler, outputs)
                if result is not outputs:
                    self._scaled[id(result)] = (outputs, float(scaler.get_scale()))
            return result

        return scaled

    def _unscale(self, unscale: Callable[..., Any]) -> Callable[..., Any]:
        def unscaled(scaler: Any, optimizer: Any) -> Any:
            self._unscaled.add(id(optimizer))
            with self.recorder.inside():
                return unscale(scaler, optimizer)

        return unscaled

    def _scaler_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            line, count = self.recorder.line(), len(self.recording.updates)
            self._update.scale = float(scaler.get_scale()) if scaler.is_enabled() else None
            self.recording.scaler = scaler
            with self.recorder.inside():
                result = step(scaler, optimizer, *args, **kwargs)
            if len(self.recording.updates) == count and self._update.backwards:  # skipped
                self._update.line, self._update.settings = line, _settings(optimizer)
                self._end_update()
            return result

        return stepped


_run_backward = torch.autograd.backward
_END = object()


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _items(name: str, x: Any) -> dict[str, Any]:
    """Return the items of a small tuple, list or dict by names."""
    if not isinstance(x, tuple | list | dict) or len(x) > _FEW:
        return {}
    pairs = x.items() if isinstance(x, dict) else enumerate(x)
    return {f"{name}_{key}": item for key, item in pairs}


_FEW = 16
"""Items of a variable that are named."""


def _leaves(batch: Any) -> Iterator[tuple[str | int | None, torch.Tensor]]:
    """Yield the tensors of a batch with their keys."""
    if isinstance(batch, torch.Tensor):
        yield None, batch
        return
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    yield from ((key, x) for key, x in items if isinstance(x, torch.Tensor))


def digest(x: torch.Tensor | None) -> str | None:
    """Return a digest of a tensor's bits; None for none."""
    if x is None:
        return None
    flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
