"""What a recorded script is: one program, one optimizer, a window of micro-batches, a schedule.

Whatever differs from this is refused, with the line of the script.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.port.calls import Value
from jaxtrain.port.clamps import Clamp, bounds
from jaxtrain.port.cut import Cut, Feed
from jaxtrain.port.find_cut import cut
from jaxtrain.port.inputs import Inputs, changed, free, of_batches
from jaxtrain.port.interval_program import Place, place_of
from jaxtrain.port.recorder import has_tensors
from jaxtrain.port.recording import Backward, Clip, Leaf, Recording, Update
from jaxtrain.port.refused import refused_at
from jaxtrain.port.same_program import check_same
from jaxtrain.port.turns import made_in, of_turns
from jaxtrain.torch_import import Line


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
      autocast: The dtype of autocast; None without it.
      is_scaled: Whether a `GradScaler` scales the loss.
      inputs: From a recorded program to where its roots come from.
      epoch: Number of updates of a whole pass over the data of a DataLoader.
      is_by_epoch: Whether the scheduler steps at the end of a pass, else after every update.
      loader: Number of the DataLoader; None for data that the script gives.
      rows: Rows of a micro-batch; 1 for data that the script gives, whose rows are micro-batches.
      cut: What the script gives; None for the data of a DataLoader.
      turns: The trainings of several optimizers that take turns, of which this is the first; none for one optimizer.
      kept_like: Tensors of the shapes of those that these keep for each other, by name.
      evaluated: Identities of the parts of its modules that are in evaluation mode.
      is_turn: Whether it is one of several turns.
      clamps: What its parameters are clamped to after an update, by identity.
    """

    recording: Recording
    modules: Mapping[str, torch.nn.Module]
    programs: tuple[tuple[Backward, Inputs], ...]
    accumulate: int
    clip: Clip | None
    optimizer: torch.optim.Optimizer
    scheduler: Any
    autocast: torch.dtype | None
    is_scaled: bool
    inputs: Callable[[Backward], Inputs]
    epoch: int = 0
    is_by_epoch: bool = False
    loader: int | None = None
    rows: int = 1
    cut: Cut | None = None
    turns: tuple["Training", ...] = ()
    kept_like: Mapping[str, torch.Tensor] = field(default_factory=dict)
    evaluated: frozenset[int] = frozenset()
    is_turn: bool = False
    clamps: Mapping[int, Clamp] = field(default_factory=dict)

    @property
    def of_turns(self) -> tuple["Training", ...]:
        """The trainings of the turns: this one alone for one optimizer."""
        return self.turns or (self,)

    @property
    def clips_itself(self) -> bool:
        """Whether its optimizer clips its own gradients, where `clip_norm` bounds the norm of all."""
        return self.clip is not None and (not self.clip.is_of_norm or self.is_turn)

    def feed(self) -> Feed:
        """Return what the script gives to the updates of a run."""
        return Feed(tuple(training.cut for training in self.of_turns if training.cut is not None))

    def windows(self) -> list[tuple[Update, list[dict[str, torch.Tensor]]]]:
        """Return the micro-batches of each update, as a run takes them."""
        feed, found = self.feed(), []
        for turn, update in self.by_turn():
            inputs = self.of_turns[turn].inputs
            window = [inputs(backward).batch_of(backward) for backward in update.backwards]
            found.append((update, feed.given(turn, window, update.settings) if feed.cuts else window))
        return found

    def by_turn(self) -> Iterator[tuple[int, Update]]:
        """Yield the updates in the order of the script, each with the number of its optimizer."""
        updates = [iter(training.recording.updates) for training in self.of_turns]
        numbers = {id(training.optimizer): i for i, training in enumerate(self.of_turns)}
        for update in self.recording.updates:
            turn = numbers[id(update.optimizer)] if self.turns else 0
            yield turn, next(updates[turn])

    def first_carried(self) -> dict[str, torch.Tensor]:
        """Return tensors of the shapes of those that an update keeps for the next one, by name."""
        backward, inputs = self.programs[0]
        like = {**inputs.batch_of(backward), **self.kept_like}
        return {name: torch.zeros_like(like[name]) for name in (*inputs.kept, *self.kept_like)}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of its modules by name."""
        return {f"{name}.{path}": x for name, part in self.modules.items() for path, x in part.named_parameters()}

    def left_out(self) -> list[Line]:
        """Return the lines of the script that read parameters, and that no loss depends on."""
        own = {*map(id, self.parameters().values())}
        updates = [update for training in self.of_turns for update in training.recording.updates[1:]]
        backwards = [backward for update in updates for backward in update.backwards]
        used = {call.line for backward in backwards for call in backward.program.calls}
        return [
            *dict.fromkeys(
                call.line
                for backward in backwards
                for call in backward.interval.calls
                if call.line not in used and any(backward.interval.identities.get(x) in own for x in call.reads())
            )
        ]


def understood(recording: Recording) -> Training:
    """Return what a recorded script is.

    Its data are those of a DataLoader if its programs begin with the batches of one; else those that the script gives.
    Several calls of `backward` in an update are micro-batches of one program, or parts of one loss.

    Raises:
      UserError: It is something else; the message names the line.
    """
    optimizers = _optimizers(recording)
    if len(optimizers) > 1:
        return _in_turn(recording, optimizers)
    try:
        return _with_loader(recording, optimizers[0])
    except UserError:
        pass
    try:
        return _with_cut(recording, optimizers[0])
    except UserError as error:
        if all(len(update.backwards) == 1 for update in recording.updates):
            raise
        try:
            (joined,) = of_turns(recording, optimizers)
            return _joined(_with_cut(joined, optimizers[0]))
        except UserError:
            raise error from None


def _joined(training: Training) -> Training:
    """Return a training whose updates have one program each, of all their calls of `backward`."""
    assert training.cut is not None
    return replace(training, cut=replace(training.cut, is_joined=True))


def _in_turn(recording: Recording, optimizers: Sequence[torch.optim.Optimizer]) -> Training:
    """Return a training of several optimizers that take turns."""
    skipped = next((update for update in recording.updates if update.optimizer is None), None)
    if skipped is not None:
        raise refused_at("several optimizers and a GradScaler", skipped.line, "scale no loss")
    modules = _modules(recording, [b for update in recording.updates for b in update.backwards], *optimizers)
    turns = of_turns(recording, optimizers)
    made = [made_in(turn) for turn in turns]
    others = [{x for other in made if other is not own for x in other} for own in made]
    cuts = [cut(turn, modules, known)[1] for turn, known in zip(turns, others, strict=True)]
    found = [
        _joined(_with_cut(turn, optimizer, modules, known, _produced(turn, turns, cuts, modules)))
        for turn, optimizer, known in zip(turns, optimizers, others, strict=True)
    ]
    like = {name: x for t in found for b, i in t.programs[:1] for name, x in i.batch_of(b).items() if name in i.carried}
    evaluated = _evaluated([b for training in found for b, _ in training.programs], modules)
    names = _rates_of_turns(recording, found)
    found = [
        replace(t, kept_like=like, evaluated=evaluated, is_turn=True, cut=replace(t.cut, rates=rates))
        for t, rates in zip(found, names, strict=True)
        if t.cut is not None
    ]
    for training in found:
        _check_turn(training)
    clamped = {key for training in found for key in training.clamps}
    for clamp in (clamp for u in recording.updates for key, clamp in u.clamps.items() if key not in clamped):
        raise refused_at("parameters are clamped before an update", clamp.line, "clamp them after each update")
    return replace(found[0], recording=recording, turns=tuple(found))


def _produced(
    turn: Recording, turns: Sequence[Recording], cuts: Sequence[Cut], modules: Mapping[str, torch.nn.Module]
) -> dict[Place, str]:
    """Return what the programs of an optimizer compute for those of others, with the names that these have for it."""
    found: dict[Place, str] = {}
    makers = {x: b for update in turn.updates for b in update.backwards for c in b.interval.calls for _, x in c.results}
    for other, its in zip(turns, cuts, strict=True):
        if other is turn:
            continue
        for backward in (b for update in other.updates for b in update.backwards):
            roots = its.read(backward, None).program.roots
            of_name = {root.name: x for x, root in zip(roots, its.roots, strict=True) if root.name in its.foreign}
            found |= {place_of(makers[x], x): name for name, x in of_name.items() if x in makers}
    return found


def _rates_of_turns(recording: Recording, turns: Sequence[Training]) -> list[tuple[str, ...]]:
    """Return names for the rates of each turn, which the script gives if one may change; else none."""
    groups = [len(turn.recording.updates[0].settings) for turn in turns]
    if not recording.schedulers and not any(_rates(turn.recording.updates) for turn in turns):
        return [()] * len(turns)
    return [("rate",) if max(groups) == 1 else tuple(f"rate_{i}" for i in range(count)) for count in groups]


def _check_turn(training: Training) -> None:
    """Refuse what a turn of several cannot have."""
    backward = training.programs[0][0]
    repeated = next((c for c in backward.program.calls if c.is_repeated and c.random is not None), None)
    problems = {
        "several optimizers and a GradScaler": training.is_scaled and backward.line,
        "random numbers that two updates share": repeated is not None and repeated.line,
    }
    for problem, line in problems.items():
        if line:
            raise refused_at(problem, line, "this is not carried over; leave one of them out")


def _with_loader(recording: Recording, optimizer: torch.optim.Optimizer) -> Training:
    """Return a training whose data are a DataLoader."""
    updates = recording.updates
    backwards = [backward for update in updates for backward in update.backwards]
    modules = _modules(recording, backwards, optimizer)
    names: dict[Leaf, str] = {}
    programs = _programs(backwards, lambda backward: of_batches(backward, modules, names))
    accumulate = _window(updates, programs)
    loader, rows = _data(programs)
    count = _batches(recording, loader)
    if count % accumulate:
        raise refused_at(
            f"the last window of an epoch has {count % accumulate} of {accumulate} micro-batches",
            updates[0].line,
            f"choose a batch size with which the {count} batches are whole windows, or accumulate nothing",
        )
    scheduler, is_by_epoch = _scheduler(recording, optimizer, loader)
    return _training(
        recording,
        modules,
        programs,
        optimizer,
        scheduler,
        inputs=lambda backward: of_batches(backward, modules, names),
        epoch=count // accumulate,
        is_by_epoch=is_by_epoch,
        loader=loader,
        rows=rows,
    )


def _with_cut(
    recording: Recording,
    optimizer: torch.optim.Optimizer,
    modules: Mapping[str, torch.nn.Module] | None = None,
    others: Collection[Value] = (),
    produced: Mapping[Place, str] | None = None,
) -> Training:
    """Return a training whose data are those that the script gives."""
    if modules is None:
        modules = _modules(recording, [b for update in recording.updates for b in update.backwards], optimizer)
    backwards, found = cut(recording, modules, others, produced)
    programs = _programs(sorted(backwards, key=lambda backward: not backward.is_led), found.inputs)
    of_update = iter(backwards)
    updates = [replace(update, backwards=[next(of_update) for _ in update.backwards]) for update in recording.updates]
    longest = max(len(update.backwards) for update in updates)
    is_uneven = any(len(update.backwards) != longest for update in updates)
    _check_sizes(longest, programs)
    rates, scheduler = _rates(recording.updates), None
    if produced is not None:  # one of several turns, whose rates the script gives
        _check_settings(recording.updates, but_for_rates=True)
    else:
        try:
            scheduler, _ = _scheduler(recording, optimizer, None)
        except UserError:
            if not rates:
                raise
    return _training(
        replace(recording, updates=updates),
        modules,
        programs,
        optimizer,
        scheduler,
        inputs=found.inputs,
        cut=replace(found, rates=rates if scheduler is None else (), window=longest if is_uneven else 0),
    )


def _training(
    recording: Recording,
    modules: Mapping[str, torch.nn.Module],
    programs: tuple[tuple[Backward, Inputs], ...],
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    **of_data: Any,
) -> Training:
    backwards = [backward for update in recording.updates for backward in update.backwards]
    _check_not_changed(backwards, modules, optimizer)
    is_scaled = any(b.scale is not None for b in backwards)
    return Training(
        recording=recording,
        modules=modules,
        programs=programs,
        accumulate=max(len(update.backwards) for update in recording.updates),
        clip=_clip(recording.updates, optimizer, is_scaled),
        optimizer=optimizer,
        scheduler=scheduler,
        autocast=_autocast(backwards),
        is_scaled=is_scaled,
        evaluated=_evaluated(backwards, modules),
        clamps=_clamps(recording.updates, optimizer),
        **of_data,
    )


def _optimizers(recording: Recording) -> list[torch.optim.Optimizer]:
    """Return the optimizers, in the order in which they were made."""
    updates = recording.updates
    found = {id(update.optimizer): update.optimizer for update in updates if update.optimizer is not None}
    if not found:
        raise refused_at(
            "every update was skipped by the GradScaler", updates[0].line, "give --updates a larger number"
        )
    waiting = [line for key, line in recording.optimizers.items() if key not in found]
    if waiting:
        raise refused_at(
            f"an optimizer made no step in {len(updates)} updates", waiting[0], "give --updates a larger number"
        )
    return [found[key] for key in recording.optimizers]


def _modules(
    recording: Recording, backwards: Sequence[Backward], *optimizers: torch.optim.Optimizer
) -> dict[str, torch.nn.Module]:
    """Return the outermost modules that programs call or read, or that are trained, by the script's names."""
    called = {
        id(c.function): c.function
        for b in backwards
        for c in b.program.calls
        if isinstance(c.function, torch.nn.Module)
    }
    read = {key for b in backwards for value, key in b.interval.identities.items() if value in b.program.roots}
    read |= {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    named = {name if name != "self" else type(part).__name__.lower(): part for name, part in recording.modules.items()}
    known = {id(part) for part in named.values()}
    for part in called.values():
        if id(part) not in known and has_tensors(part):
            named.setdefault(free(type(part).__name__.lower(), named), part)
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
    for optimizer, p in ((o, p) for o in optimizers for group in o.param_groups for p in group["params"]):
        if id(p) not in own:
            raise refused_at(
                f"a trained tensor {list(p.shape)} belongs to no module",
                recording.optimizers.get(id(optimizer)),
                "make it a parameter of a torch.nn.Module",
            )
    return used


def _evaluated(backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module]) -> frozenset[int]:
    """Return the identities of the parts of modules that are called in evaluation mode."""
    paths = {id(part): f"{name}.{path}".strip(".") for name in modules for path, part in modules[name].named_modules()}
    modes: dict[int, bool] = {}
    for call in (call for backward in backwards for call in backward.program.calls):
        parts = call.function.modules() if isinstance(call.function, torch.nn.Module) else ()
        for part in parts:
            if modes.setdefault(id(part), id(part) in call.evaluated) != (id(part) in call.evaluated):
                what = f"{paths.get(id(part), type(part).__name__)} is called in training and in evaluation mode"
                raise refused_at(what, call.line, "call it in one of them, or a copy of it")
    return frozenset(key for key, is_evaluated in modes.items() if is_evaluated)


def _check_not_changed(
    backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {f"{name}.{path}" for name in modules for path, p in modules[name].named_parameters() if id(p) in trained}
    for backward in backwards:
        writes = [call for call in backward.program.calls if call.writes]
        for name in sorted(names.intersection(changed(backward, writes, modules))):
            call = next(call for call in writes if name in changed(backward, [call], modules))
            raise refused_at(
                f"{name} is trained, and changed by hand", call.line, "let its optimizer alone change a parameter"
            )


def _programs(
    backwards: Sequence[Backward], inputs_of: Callable[[Backward], Inputs]
) -> tuple[tuple[Backward, Inputs], ...]:
    """Return a micro-batch of each shape, of which all programs are equal."""
    found: dict[Any, tuple[Backward, Inputs]] = {}
    for backward in backwards:
        inputs = inputs_of(backward)
        shapes = tuple((name, tuple(x.shape)) for name, x in inputs.batch_of(backward).items())
        is_new = shapes not in found
        first = found.setdefault(shapes, (backward, inputs))
        check_same(*first, backward, inputs)
        if is_new:  # a batch of another size: the same program, but for sizes
            check_same(*next(iter(found.values())), backward, inputs, of_sizes=True)
    return tuple(found.values())


def _window(updates: Sequence[Update], programs: Sequence[tuple[Backward, Inputs]]) -> int:
    count = len(updates[0].backwards)
    for update in updates:
        if len(update.backwards) != count:
            raise refused_at(
                f"an update has {len(update.backwards)} calls of backward, the first one {count}",
                update.line,
                "accumulate the same number of micro-batches in every update",
            )
    _check_sizes(count, programs)
    return count


def _check_sizes(count: int, programs: Sequence[tuple[Backward, Inputs]]) -> None:
    if count > 1 and len(programs) > 1:
        raise refused_at(
            "the micro-batches of a window differ in size", programs[1][0].line, "give the DataLoader drop_last=True"
        )


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
    if not trained <= {*clip.parameters}:
        raise refused_at("some of the trained parameters are clipped", clip.line, "clip all of them")
    return clip


def _clamps(updates: Sequence[Update], optimizer: torch.optim.Optimizer) -> dict[int, Clamp]:
    """Return what the parameters of an optimizer are clamped to after each of its updates."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped = [update for update in updates if update.optimizer is not None]
    first = bounds(stepped[0].clamps, own)
    for i, update in enumerate(stepped):
        its = bounds(update.clamps, own)
        if its != first and (its or i < len(stepped) - 1):  # what follows the last one is not recorded
            line = next(iter((update.clamps or stepped[0].clamps).values())).line
            raise refused_at("parameters are clamped after some updates alone", line, "clamp them after every update")
    return {key: clamp for key, clamp in stepped[0].clamps.items() if key in own}


def _scheduler(recording: Recording, optimizer: torch.optim.Optimizer, loader: int | None) -> tuple[Any, bool]:
    """Return the scheduler, None without one, and whether it steps at the end of a pass."""
    updates = recording.updates
    steps = [step for update in (*updates, recording.rest) for step in update.schedulers]
    stepped, made = {id(step[0]): step for step in steps}, [*recording.schedulers.values()]
    if len(stepped) > 1:
        raise refused_at("two schedulers step", [*stepped.values()][1][1], "combine them by ChainedScheduler")
    if not stepped:
        _check_settings(updates)
        if made:
            raise refused_at(f"no scheduler stepped in {len(updates)} updates", made[0], "give --updates more")
        return None, False
    ((scheduler, line),) = stepped.values()
    if scheduler.optimizer is not optimizer:
        raise refused_at(f"{type(scheduler).__name__} schedules another optimizer", line, "schedule the one that steps")
    if _has_function(scheduler):
        raise refused_at(f"{type(scheduler).__name__} has a function of the script's", line, "use another scheduler")
    later = [*updates[1:], *([recording.rest] if recording.is_over else [])]
    counts = [len(update.schedulers) for update in later]
    if all(count == 1 for count in counts):
        return scheduler, False
    if loader is not None and counts == [update.passes.count(loader) for update in later]:
        return scheduler, True
    raise refused_at(
        "the scheduler steps neither after every update nor after every epoch", line, "step it at one of these"
    )


def _check_settings(updates: Sequence[Update], *, but_for_rates: bool = False) -> None:
    """Refuse settings that change from update to update."""

    def of(update: Update) -> list[dict[str, Any]]:
        return [{**group, "lr": 0} if but_for_rates else group for group in update.settings]

    changed = next((u for u in updates if u.settings and of(u) != of(updates[0])), None)
    if changed is not None:
        raise refused_at(
            f"settings of the optimizer change without a scheduler{_difference(of(updates[0]), of(changed))}",
            changed.line,
            "use a scheduler of torch.optim.lr_scheduler",
        )


def _has_function(scheduler: Any) -> bool:
    """Return whether a scheduler, or one that it contains, computes rates by a function in Python."""
    return hasattr(scheduler, "lr_lambdas") or any(map(_has_function, getattr(scheduler, "_schedulers", ())))


def _rates(updates: Sequence[Update]) -> tuple[str, ...]:
    """Return names for the rates of groups; none if these are constant, or if other settings change."""
    found = [update.settings for update in updates if update.settings]
    if any(
        {**group, "lr": 0} != {**first, "lr": 0}
        for groups in found
        for group, first in zip(groups, found[0], strict=True)
    ):
        return ()
    by_group = [[groups[i]["lr"] for groups in found] for i in range(len(found[0]))]
    if all(len({*rates}) == 1 for rates in by_group):
        return ()
    is_one = all(rates == by_group[0] for rates in by_group)
    return tuple("rate" if is_one else f"rate_{i}" for i in range(len(by_group)))


def _difference(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    pairs = zip(before, after, strict=False)
    found = [(key, x[key], y.get(key)) for x, y in pairs for key in x if x[key] != y.get(key)]
    return f" ({found[0][0]} {found[0][1]}, then {found[0][2]})" if found else ""


def _autocast(backwards: Sequence[Backward]) -> torch.dtype | None:
    found = {c.ambient.autocast: c.line for b in backwards for c in b.program.calls if c.ambient.autocast is not None}
    if len({dtype for dtype, _ in found}) > 1:
        raise refused_at("autocast regions of two dtypes", [*found.values()][1], "use one")
    return next((dtype for dtype, _ in found), None)
