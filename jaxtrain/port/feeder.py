"""The process that runs a script as the source of a ported run's batches: `python -m jaxtrain.port.feeder`.

The script runs without its model: a call of a module is answered with what the module returned first for arguments of
these shapes, `backward` and the steps of optimizers do nothing. What the programs of its updates would have
read is sent to the run that trains. Nothing of that depends on what the model computes: `jaxtrain port` has compared
two runs with answers that differ.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from jaxtrain.errors import UserError
from jaxtrain.port.calls import tensors_in
from jaxtrain.port.cut import Feed
from jaxtrain.port.kept_files import kept_files
from jaxtrain.port.recording import Backward
from jaxtrain.port.refused import Refused
from jaxtrain.port.script import Watch, run, seed_all
from jaxtrain.port.windows import Windows
from jaxtrain.torch_internals import pytree


class Feeder(Watch):
    """Sends what the programs of a script's updates read.

    Args:
      script: The script.
      feed: What its updates read.
      send: Called with the tensors of a micro-batch, by name, when the optimizer steps that it is for.
      shift: What is added to the numbers of answers.
      seed: Seed of the random numbers after the first call of `backward`; None for the script's own.
    """

    def __init__(
        self, script: Path, feed: Feed, send: Callable[[dict[str, Any]], None], shift: float, seed: int | None
    ) -> None:
        super().__init__(script, 0, lambda _: None)
        self._feed, self._send, self._shift, self._seed = feed, send, shift, seed
        self._own: list[Backward] = []  # of this update
        self._windows = Windows(feed)
        self._answers: dict[Any, Any] = {}
        self.recorder.answer, self.recorder.answer_gradient = self._answer, self._answer_gradient

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is replaced in PyTorch."""
        yield from super().replacements()
        scaler = torch.amp.GradScaler
        yield scaler, "scale", lambda _, outputs: outputs
        yield scaler, "unscale_", lambda _, optimizer: None
        yield scaler, "step", lambda _, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs)
        yield scaler, "update", lambda _, new_scale=None: None
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                yield owner, name, lambda *args, **kwargs: torch.zeros(())

    def one_pass(self, loader: Any) -> Iterator[Any]:
        """Return all batches of a DataLoader."""
        return all_batches(loader)

    def around_module(self, module: torch.nn.Module, call: Callable[[], Any]) -> Any:
        """Call a module."""
        return call()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Note the calls that a loss depends on."""
        with self.recorder.inside():
            self._own.append(self.program(loss, None, self.recorder.line()))
        self.recorder.end_interval()
        if self._seed is not None:
            seed_all(self._seed)
            self._seed = None

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Send the micro-batches of an update, which a closure may compute."""
        closure = next((x for x in (*args[1:], *kwargs.values()) if x is not None), None)
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._in_step.enter_context(self.recorder.inside())
        try:
            self._send_window(optimizer)
        except UserError as error:
            raise Refused(error) from None
        return (optimizer,), {}

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End the step."""
        self._in_step.close()

    def _send_window(self, optimizer: Any) -> None:
        number = [*self.recording.optimizers].index(id(optimizer))
        for micro_batch in self._windows.read(number, self._own, self._optimizers):
            self._send({name: x.cpu() for name, x in micro_batch.items()})
        self._own = []

    def _answer(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what a module returned first for such arguments, in new tensors."""
        key = id(module), module.training, torch.is_grad_enabled(), _described((args, kwargs))
        if key not in self._answers:
            self._answers[key] = module(*args, **kwargs)
        result = self._answers[key]
        if len([*tensors_in(result)]) != sum(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
            return module(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._fresh, result)

    def _answer_gradient(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return tensors of the shapes of gradients."""
        of = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        return tuple(self._fresh(torch.ones_like(x).requires_grad_()) for x in of)

    def _fresh(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x.detach() + self._shift if x.is_floating_point() and self._shift else x.detach().clone()
        return shifted.requires_grad_().clone() if x.requires_grad and torch.is_grad_enabled() else shifted


all_batches = DataLoader.__iter__
"""The batches of a pass over a DataLoader, whose own method is replaced while a script runs."""


def _described(argument: Any) -> Any:
    """Return what arguments share that have the same shapes."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.dtype
    if isinstance(argument, Mapping):
        return tuple((key, _described(x)) for key, x in argument.items())
    if isinstance(argument, tuple | list):
        return tuple(map(_described, argument))
    return argument if argument.__hash__ else repr(argument)


def main(args: list[str]) -> None:
    """Send the micro-batches of a script.

    Args:
      args: A file descriptor, the shift, the seed or "None", a folder for files that are kept, the file of what
        programs have in common, the script, and its own arguments.
    """
    pipe, shift, seed, kept, found, script, *own = args
    connection = Connection(int(pipe), readable=False)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def send(micro_batch: dict[str, torch.Tensor]) -> None:
        connection.send({name: to_numpy(x) for name, x in micro_batch.items()})

    from jaxtrain.data import tensor_to_numpy as to_numpy

    try:
        with kept_files(Path(kept)):
            feed, given = Feed.of_json(Path(found).read_text()), None if seed == "None" else int(seed)
            run(Path(script), own, Feeder(Path(script), feed, send, float(shift), given))
    except BrokenPipeError:  # the run has all that it needs
        return
    except UserError as error:
        connection.send(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
