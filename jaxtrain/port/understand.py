"""What a recorded script is: one program, one optimizer, a window of micro-batches, a schedule.

Whatever differs from this is refused, with the line of the script.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jaxtrain.errors import UserError, format_location
from jaxtrain.port.calls import Value
from jaxtrain.port.recorder import has_tensors
from jaxtrain.port.recording import Backward, Clip, Leaf, Recording, Update
from jaxtrain.port.script import digest
from jaxtrain.torch_import import Line


@dataclass(frozen=True, eq=False)
class Inputs:
    """Where the roots of a program come from.

    Attributes:
      owned: Parameters and buffers of the script's modules, by name.
      batch: Tensors of a batch, by the name of the script's variable.
      leaves: Places of these in the batch, by the same name.
      constants: The others, whose values never change.
    """

    owned: Mapping[Value, str]
    batch: Mapping[Value, str]
    leaves: Mapping[str, Leaf]
    constants: Mapping[Value, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Training:
    """A training loop.

    Attributes:
      recording: The recording that it was read from.
      modules: The modules of its program, by name.
      programs: A micro-batch for each shape of batches; the first is that of the first batch.
      accumulate: Number of micro-batches of an update.
      clip: How gradients are clipped; None if they are not.
      optimizer: The optimizer.
      scheduler: Its scheduler; None without one.
      epoch: Number of updates of a whole pass over the data.
      is_by_epoch: Whether the scheduler steps at the end of a pass, else after every update.
      loader: Number of the DataLoader.
      rows: Rows of one of its batches.
      autocast: The dtype of autocast; None without it.
      is_scaled: Whether a `GradScaler` scales the loss.
    """

    recording: Recording
    modules: Mapping[str, torch.nn.Module]
    programs: tuple[tuple[Backward, Inputs], ...]
    accumulate: int
    clip: Clip | None
    optimizer: torch.optim.Optimizer
    scheduler: Any
    epoch: int
    is_by_epoch: bool
    loader: int
    rows: int
    autocast: torch.dtype | None
    is_scaled: bool

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of its modules by name."""
        return {f"{name}.{path}": x for name, part in self.modules.items() for path, x in part.named_parameters()}


def understood(recording: Recording) -> Training:
    """Return what a recorded script is.

    Raises:
      UserError: It is something else; the message names the line.
    """
    updates = recording.updates
    backwards = [backward for update in updates for backward in update.backwards]
    optimizer = _only_optimizer(updates)
    modules = _modules(recording, backwards, optimizer)
    programs = _programs(backwards, modules)
    _check_modes(backwards, modules)
    accumulate = _window(updates)
    loader, rows = _data(programs)
    count = _batches(recording, loader)
    if count % accumulate:
        raise refused_at(
            f"the last window of an epoch has {count % accumulate} of {accumulate} micro-batches",
            updates[0].line,
            f"choose a batch size with which the {count} batches are whole windows, or accumulate nothing",
        )
    if accumulate > 1 and len(programs) > 1:
        raise refused_at(
            "the micro-batches of a window differ in size", programs[1][0].line, "give the DataLoader drop_last=True"
        )
    scheduler, is_by_epoch = _scheduler(recording, optimizer, loader)
    return Training(
        recording=recording,
        modules=modules,
        programs=programs,
        accumulate=accumulate,
        clip=_clip(updates, optimizer, any(b.scale is not None for b in backwards)),
        optimizer=optimizer,
        scheduler=scheduler,
        epoch=count // accumulate,
        is_by_epoch=is_by_epoch,
        loader=loader,
        rows=rows,
        autocast=_autocast(backwards),
        is_scaled=any(b.scale is not None for b in backwards),
    )


def inputs_of(training: Training, backward: Backward) -> Inputs:
    """Return where the roots of a micro-batch's program come from."""
    names = {leaf: name for _, inputs in training.programs for name, leaf in inputs.leaves.items()}
    return _inputs(backward, training.modules, names)


def refused_at(problem: str, line: Line | None, remedy: str) -> UserError:
    """Return the error of a script that cannot be carried over, with its line."""
    at = f" ({format_location(line.file, line.number)})" if line is not None else ""
    return UserError(f"{problem}{at}: {remedy}")


def _only_optimizer(updates: Sequence[Update]) -> torch.optim.Optimizer:
    found = {id(update.optimizer): update for update in updates if update.optimizer is not None}
    if not found:
        raise refused_at(
            "every update was skipped by the GradScaler", updates[0].line, "give --updates a larger number"
        )
    if len(found) > 1:
        other = [*found.values()][1]
        raise refused_at("a second optimizer steps", other.line, "one optimizer can be carried over")
    (update,) = found.values()
    assert update.optimizer is not None
    return update.optimizer


def _modules(
    recording: Recording, backwards: Sequence[Backward], optimizer: torch.optim.Optimizer
) -> dict[str, torch.nn.Module]:
    """Return the outermost modules that programs call or read, or that are trained, by the script's names."""
    called = {
        id(c.function): c.function
        for b in backwards
        for c in b.program.calls
        if isinstance(c.function, torch.nn.Module)
    }
    read = {key for b in backwards for value, key in b.interval.identities.items() if value in b.program.roots}
    read |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name if name != "self" else type(part).__name__.lower(): part for name, part in recording.modules.items()}
    known = {id(part) for part in named.values()}
    for part in called.values():
        if id(part) not in known and has_tensors(part):
            named.setdefault(_free(type(part).__name__.lower(), named), part)
    inner = {id(x) for part in named.values() for x in part.modules() if x is not part}
    used = {
        name: part
        for name, part in named.items()
        if id(part) not in inner
        and (
            any(id(x) in called for x in part.modules())
            or not read.isdisjoint(map(id, (*part.parameters(), *part.buffers())))
        )
    }
    own = {id(x) for part in used.values() for x in part.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in own:
                raise refused_at(
                    f"a trained tensor {list(p.shape)} belongs to no module",
                    recording.optimizers.get(id(optimizer)),
                    "make it a parameter of a torch.nn.Module",
                )
    return used


def _free(name: str, taken: Collection[str]) -> str:
    return name if name not in taken else next(x for i in range(2, 10**6) if (x := f"{name}_{i}") not in taken)


def _check_modes(backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module]) -> None:
    own = {id(part): path for name, root in modules.items() for path, part in _paths(name, root)}
    for backward in backwards:
        for part, line in backward.evaluated.items():
            if part in own:
                raise refused_at(
                    f"{own[part]} is in evaluation mode while it is trained", line, "call .train() of the whole model"
                )


def _paths(name: str, root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((f"{name}.{path}" if path else name, part) for path, part in root.named_modules())


def _programs(
    backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module]
) -> tuple[tuple[Backward, Inputs], ...]:
    """Return a micro-batch of each shape, of which all programs are equal."""
    found: dict[Any, tuple[Backward, Inputs]] = {}
    names: dict[Leaf, str] = {}
    for backward in backwards:
        inputs = _inputs(backward, modules, names)
        shapes = tuple((name, tuple(backward.tensors[value].shape)) for value, name in inputs.batch.items())
        is_new = shapes not in found
        first = found.setdefault(shapes, (backward, inputs))
        _compare(*first, backward, inputs)
        if is_new:  # a batch of another size: the same program, but for sizes
            _compare(*next(iter(found.values())), backward, inputs, of_sizes=True)
    return tuple(found.values())


def _inputs(backward: Backward, modules: Mapping[str, torch.nn.Module], names: dict[Leaf, str]) -> Inputs:
    by_id = {
        id(x): f"{name}.{path}"
        for name, part in modules.items()
        for path, x in (*part.named_parameters(), *part.named_buffers())
    }
    known = backward.interval.identities
    owned = {value: by_id[known[value]] for value in backward.program.roots if known.get(value) in by_id}
    leaves = {value: leaf for value, leaf in backward.leaves.items() if value in backward.program.roots}
    for value, leaf in leaves.items():
        if leaf not in names:
            name = leaf.key if isinstance(leaf.key, str) else backward.names.get(value) or f"batch_{leaf.key or 0}"
            names[leaf] = _free(name if name.isidentifier() and name != "self" else "batch", {*names.values()})
    batch = {value: names[leaf] for value, leaf in leaves.items()}
    rest = {x: backward.tensors[x] for x in backward.program.roots if x not in owned and x not in batch}
    return Inputs(owned, batch, {names[leaf]: leaf for leaf in leaves.values()}, rest)


def _compare(first: Backward, its: Inputs, other: Backward, inputs: Inputs, *, of_sizes: bool = False) -> None:
    """Refuse a program that differs from another one, except for integers if these are sizes of batches that differ."""
    calls = (_described(*program, of_sizes=of_sizes) for program in ((first, its), (other, inputs)))
    for one, two in itertools.zip_longest(*calls):
        if one == two:
            continue
        line = (two or one)[0]
        if one is None or two is None or one[1] != two[1]:
            raise refused_at("the calls of an update differ from update to update", line, _SAME)
        if one[2] != two[2]:
            raise refused_at(f"an argument differs from update to update ({one[2]}, then {two[2]})"[:300], line, _SAME)
        raise refused_at("what a call reads, or its autocast region, differs from update to update", line, _SAME)
    for value, constant in zip(inputs.constants, its.constants, strict=True):
        if digest(inputs.constants[value]) != digest(its.constants[constant]):
            line = next((c.line for c in other.program.calls if value in {*c.reads()}), other.line)
            raise refused_at(
                f"a tensor {list(inputs.constants[value].shape)} differs from update to update and comes from no batch",
                line,
                "take it from the batch, or keep it as a buffer of the module",
            )


_SAME = "a step computes the same in every update; what differs belongs into the batch"


def _described(backward: Backward, inputs: Inputs, *, of_sizes: bool) -> Iterator[tuple[Any, ...]]:
    """Yield a description of each call that is equal for equal programs: line, function, arguments, and the rest."""
    numbers = {value: f"<{i}>" for i, value in enumerate(inputs.constants)}
    numbers |= {value: f"<{name}>" for value, name in (*inputs.owned.items(), *inputs.batch.items())}
    for call in backward.program.calls:
        for path, value in call.results:
            numbers[value] = f"<result {len(numbers)} {path}>"
        arguments = _plain((call.args, call.kwargs), numbers, of_sizes)
        what = _module_key(call.function) if isinstance(call.function, torch.nn.Module) else _key(call.function)
        yield call.line, what, arguments, (call.ambient, call.random is None, len(call.results), len(call.writes))


def _module_key(module: torch.nn.Module) -> Any:
    """Return what equal modules share: those without tensors, as a loss made in every epoch, need not be one object."""
    return module if has_tensors(module) else (type(module), str(module))


def _key(function: Any) -> Any:
    """Return what equal functions share: methods of attributes are made anew for each call."""
    return getattr(function, "__self__", None), getattr(function, "__qualname__", function)


def _plain(argument: Any, numbers: Mapping[Value, str], of_sizes: bool) -> Any:
    if isinstance(argument, Value):
        return numbers[argument]
    if isinstance(argument, slice):
        return ("slice", _plain((argument.start, argument.stop, argument.step), numbers, of_sizes))
    if isinstance(argument, tuple | list):
        return tuple(_plain(item, numbers, of_sizes) for item in argument)
    if isinstance(argument, Mapping):
        return tuple((key, _plain(item, numbers, of_sizes)) for key, item in argument.items())
    return "size" if of_sizes and type(argument) is int else argument


def _window(updates: Sequence[Update]) -> int:
    count = len(updates[0].backwards)
    for update in updates:
        if len(update.backwards) != count:
            raise refused_at(
                f"an update has {len(update.backwards)} calls of backward, the first one {count}",
                update.line,
                "accumulate the same number of micro-batches in every update",
            )
    return count


def _data(programs: Sequence[tuple[Backward, Inputs]]) -> tuple[int, int]:
    """Return the number of the DataLoader, and the rows of its first batch."""
    backward, inputs = programs[0]
    loaders = {leaf.loader for _, inputs in programs for leaf in inputs.leaves.values()}
    if len(loaders) != 1 or -1 in loaders:
        problem = (
            "the loss reads batches of several DataLoaders" if loaders else "the loss reads no batch of a DataLoader"
        )
        raise refused_at(problem, backward.line, "take the batches from one torch.utils.data.DataLoader")
    rows = {backward.tensors[value].shape[0] if backward.tensors[value].ndim else 0 for value in inputs.batch}
    if len(rows) != 1 or 0 in rows:
        raise refused_at(
            "the tensors of a batch differ in their rows", backward.line, "give each the rows of the batch"
        )
    return loaders.pop(), rows.pop()


def _batches(recording: Recording, loader: int) -> int:
    found = recording.loaders[loader]
    try:
        return len(found.loader)
    except TypeError:
        raise refused_at("the DataLoader has no length", found.line, "give its dataset a __len__") from None


def _clip(updates: Sequence[Update], optimizer: torch.optim.Optimizer, is_scaled: bool) -> Clip | None:
    found = [update.clips for update in updates if update.optimizer is not None]
    first = found[0]
    for clips in found:
        if len(clips) > 1:
            raise refused_at("gradients are clipped twice", clips[1].line, "clip once")
        same = [(c.function, c.bound, c.options, c.parameters) for c in clips]
        if same != [(c.function, c.bound, c.options, c.parameters) for c in first]:
            raise refused_at(
                "clipping differs from update to update", (clips or first)[0].line, "clip alike in every update"
            )
    if not first:
        return None
    (clip,) = first
    if clip.options.get("norm_type", 2.0) != 2.0 or clip.options.get("error_if_nonfinite"):
        raise refused_at(f"{clip.function} with {dict(clip.options)}", clip.line, "clip by the norm of order 2")
    if is_scaled and not clip.is_unscaled:
        raise refused_at("gradients are clipped before GradScaler.unscale_", clip.line, "unscale them first")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not trained <= clip.parameters:
        raise refused_at("some of the trained parameters are clipped", clip.line, "clip all of them")
    return clip


def _scheduler(recording: Recording, optimizer: torch.optim.Optimizer, loader: int) -> tuple[Any, bool]:
    """Return the scheduler, None without one, and whether it steps at the end of a pass."""
    updates = recording.updates
    steps = [step for update in (*updates, recording.rest) for step in update.schedulers]
    stepped, made = {id(step[0]): step for step in steps}, [*recording.schedulers.values()]
    if len(stepped) > 1:
        raise refused_at("two schedulers step", [*stepped.values()][1][1], "combine them by ChainedScheduler")
    if not stepped:
        changed = next((u for u in updates if u.settings and u.settings != updates[0].settings), None)
        if changed is not None:
            raise refused_at(
                f"settings of the optimizer change without a scheduler{_difference(updates[0], changed)}",
                changed.line,
                "use a scheduler of torch.optim.lr_scheduler",
            )
        if made:
            raise refused_at(f"no scheduler stepped in {len(updates)} updates", made[0], "give --updates more")
        return None, False
    ((scheduler, line),) = stepped.values()
    if scheduler.optimizer is not optimizer:
        raise refused_at(f"{type(scheduler).__name__} schedules another optimizer", line, "schedule the one that steps")
    later = [*updates[1:], *([recording.rest] if recording.is_over else [])]
    counts = [len(update.schedulers) for update in later]
    if all(count == 1 for count in counts):
        return scheduler, False
    if counts == [update.passes.count(loader) for update in later]:
        return scheduler, True
    raise refused_at(
        "the scheduler steps neither after every update nor after every epoch", line, "step it at one of these"
    )


def _difference(before: Update, after: Update) -> str:
    pairs = zip(before.settings, after.settings, strict=False)
    found = [(key, x[key], y.get(key)) for x, y in pairs for key in x if x[key] != y.get(key)]
    return f" ({found[0][0]} {found[0][1]}, then {found[0][2]})" if found else ""


def _autocast(backwards: Sequence[Backward]) -> torch.dtype | None:
    found = {c.ambient.autocast: c.line for b in backwards for c in b.program.calls if c.ambient.autocast is not None}
    if len({dtype for dtype, _ in found}) > 1:
        raise refused_at("autocast regions of two dtypes", [*found.values()][1], "use one")
    return next((dtype for dtype, _ in found), None)
