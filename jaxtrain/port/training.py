"""A training loop: the programs of its updates, its optimizers, and their settings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.port.clamps import Clamp
from jaxtrain.port.clips import clamps_of, clip_of
from jaxtrain.port.cut import Cut, Feed
from jaxtrain.port.inputs import Inputs
from jaxtrain.port.joint import Joint, owned
from jaxtrain.port.recording import Backward, Clip, Recording, Update
from jaxtrain.port.schedules import scheduler_of
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
      optimizer: The optimizer, or those that update together.
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
      evaluated: Identities of the parts of its modules that are first called in evaluation mode.
      other_mode: The error of a module that is called in both modes, if these compute different things; None without.
      is_turn: Whether it is one of several turns.
      clamps: What its parameters are clamped to after an update, by identity.
    """

    recording: Recording
    modules: Mapping[str, torch.nn.Module]
    programs: tuple[tuple[Backward, Inputs], ...]
    accumulate: int
    clip: Clip | None
    optimizer: torch.optim.Optimizer | Joint
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
    other_mode: UserError | None = None
    is_turn: bool = False
    clamps: Mapping[int, Clamp] = field(default_factory=dict)

    @property
    def of_turns(self) -> tuple["Training", ...]:
        """The trainings of the turns: this one alone for one optimizer."""
        return self.turns or (self,)

    @property
    def parts(self) -> tuple["Training", ...]:
        """The trainings of optimizers that update together, each with its own settings; this one alone for one.

        Raises:
          UserError: Their schedulers or their clipping cannot be carried over.
        """
        return _parts(self, self.optimizer) if isinstance(self.optimizer, Joint) else (self,)

    @property
    def clips_scaled(self) -> bool:
        """Whether gradients are clipped before a `GradScaler` unscales them."""
        return self.clip is not None and self.is_scaled and not self.clip.is_unscaled

    @property
    def clips_itself(self) -> bool:
        """Whether its optimizer clips its own gradients, where `clip_norm` bounds the norm of all."""
        return self.clip is not None and not self.clips_scaled and (not self.clip.is_of_norm or self.is_turn)

    @property
    def clip_norm(self) -> float | None:
        """The bound of the norm of all gradients; None without one."""
        return None if self.clip is None or self.clips_itself or self.clips_scaled else self.clip.bound

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


def _parts(training: Training, joint: Joint) -> tuple[Training, ...]:
    """Return the trainings of optimizers that update together."""
    recording, first, found = training.recording, 0, list[Training]()
    for part in joint.parts:
        groups = slice(first, first + len(part.param_groups))
        updates = [_of_part(update, part, groups) for update in recording.updates]
        stepped = {id(x): line for update in (*updates, recording.rest) for x, line in update.schedulers}
        own = replace(recording, updates=updates, rest=_of_part(recording.rest, part, groups), schedulers=stepped)
        cut = None if training.cut is None else replace(training.cut, rates=training.cut.rates[groups])
        has_rates = cut is not None and bool(cut.rates)
        scheduler, is_by_epoch = (None, False) if has_rates else scheduler_of(own, part, training.loader)
        its = replace(training, recording=own, optimizer=part, scheduler=scheduler, is_by_epoch=is_by_epoch, cut=cut)
        clip = None if training.clip is not None else clip_of(updates, part)
        found.append(replace(its, clip=clip, clamps=clamps_of(updates, part), is_turn=True))
        first = groups.stop
    return tuple(found)


def _of_part(update: Update, part: torch.optim.Optimizer, groups: slice) -> Update:
    """Return what an update is for one of several optimizers."""
    own = owned(part)
    return replace(
        update,
        optimizer=None if update.optimizer is None else part,
        settings=update.settings[groups],
        schedulers=[(x, line) for x, line in update.schedulers if x.optimizer is part],
        clips=[clip for clip in update.clips if own.issuperset(clip.parameters)],
    )
