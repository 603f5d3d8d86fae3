"""What happened while a script ran: its programs, and what it did between them. Values alone, no behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from jaxtrain.port.calls import Interval, Program, Value
from jaxtrain.port.clamps import Clamp
from jaxtrain.port.joint import Joint
from jaxtrain.torch_import import Line


class Leaf(NamedTuple):
    """A tensor of a batch.

    Attributes:
      loader: Number of its DataLoader, in the order in which they were made.
      key: Its key in the batch, or its place; None for a batch that is one tensor.
    """

    loader: int
    key: str | int | None


@dataclass(frozen=True, eq=False)
class Backward:
    """A call of `backward`, and the program of its loss.

    Attributes:
      interval: What was called since the last one.
      program: The calls that the loss depends on.
      leaves: Tensors of a batch that they read.
      names: Names of the script's variables, by number of the tensor.
      numbers: The numbers with a fraction that its variables hold, by name.
      loss: Value of the loss, before it was scaled.
      scale: Factor of `GradScaler.scale`; None without one.
      line: The line of the script.
      reads: Lines that have read values of tensors since the last one.
      is_carried: Whether it reads what the program before has kept for it.
      is_led: Whether it begins with what follows an update, where programs do that follow one.
    """

    interval: Interval
    program: Program
    leaves: Mapping[Value, Leaf]
    names: Mapping[Value, str]
    numbers: Mapping[str, float]
    loss: torch.Tensor
    scale: float | None
    line: Line
    reads: tuple[Line, ...]
    is_carried: bool = False
    is_led: bool = True

    @property
    def tensors(self) -> Mapping[Value, torch.Tensor]:
        """What the tensors were that its calls read, by number."""
        return self.interval.given


@dataclass(frozen=True)
class Clip:
    """A call of `clip_grad_norm_` or `clip_grad_value_`.

    Attributes:
      function: Its name.
      bound: The largest norm or value.
      options: Its other arguments.
      parameters: Identities of the parameters that it clips, in their order.
      is_unscaled: Whether the gradients were unscaled before.
      line: The line of the script.
    """

    function: str
    bound: float
    options: Mapping[str, Any]
    parameters: tuple[int, ...]
    is_unscaled: bool
    line: Line

    @property
    def is_of_norm(self) -> bool:
        """Whether it is `clip_grad_norm_`."""
        return self.function == "clip_grad_norm_"

    @property
    def bounds(self) -> dict[str, float]:
        """The arguments of `optim.clipped`."""
        return {"max_norm" if self.is_of_norm else "max_value": self.bound}


@dataclass(eq=False)
class Update:
    """What the script did from one step of an optimizer to the next.

    Attributes:
      backwards: The calls of `backward`.
      clips: What clipped gradients.
      optimizer: The optimizer that stepped, or those that stepped together; None for an update that a `GradScaler`
        skipped.
      settings: Its groups when it stepped or was skipped, without parameters.
      gradients: Digests of its parameters' gradients when it stepped, by their places in the groups.
      after: Digests of the parameters after its step.
      schedulers: Schedulers that stepped since the update before.
      passes: Numbers of the DataLoaders whose passes ended since the update before.
      scale: The scale of the `GradScaler`; None without one.
      line: The line of the script that stepped.
      clamps: What parameters are clamped to before the next update, by identity.
    """

    backwards: list[Backward] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | Joint | None = None
    settings: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[str | None] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    schedulers: list[tuple[Any, Line]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    scale: float | None = None
    line: Line | None = None
    clamps: dict[int, Clamp] = field(default_factory=dict)


class Pass(NamedTuple):
    """A DataLoader of the script.

    Attributes:
      loader: The loader.
      line: The line of the script that made it.
      is_early: Whether it was made before the first update.
    """

    loader: Any
    line: Line
    is_early: bool = True


@dataclass(eq=False)
class Recording:
    """A recorded script.

    Attributes:
      updates: Its updates.
      rest: What it did after the last update.
      loaders: Its DataLoaders, in the order in which they were made.
      optimizers: The lines that made its optimizers.
      schedulers: The lines that made its schedulers.
      modules: The modules that its variables hold, by name.
      batches: The first batch of each loader, by its number.
      scaler: Its `GradScaler`; None without one.
      start: Parameters and buffers of these modules before the first update, by identity.
      is_over: Whether the script ended by itself.
      is_shortened: Whether passes over its DataLoaders left batches out.
    """

    updates: list[Update] = field(default_factory=list)
    rest: Update = field(default_factory=Update)
    loaders: list[Pass] = field(default_factory=list)
    optimizers: dict[int, Line] = field(default_factory=dict)
    schedulers: dict[int, Line] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    batches: dict[int, Any] = field(default_factory=dict)
    scaler: Any = None
    start: dict[int, torch.Tensor] = field(default_factory=dict)
    is_over: bool = False
    is_shortened: bool = False
