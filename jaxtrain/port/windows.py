"""The micro-batches of a script's updates as a run takes them, read while the script runs."""

from collections.abc import Sequence

import torch

from jaxtrain.port.cut import Feed
from jaxtrain.port.recording import Backward
from jaxtrain.port.refused import refused_at
from jaxtrain.port.script import digest
from jaxtrain.port.turns import Turns


class Windows:
    """Reads the windows of updates, one after another.

    Args:
      feed: What the updates read.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed, self._turns = feed, Turns()
        self._last: dict[int, Backward] = {}  # by turn

    def read(
        self, number: int, backwards: Sequence[Backward], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the micro-batches of an update.

        Args:
          number: Number of its optimizer, or of the first of those that make it together.
          backwards: Its calls of `backward`.
          optimizers: The optimizers of the script, in the order in which it makes them.

        Raises:
          UserError: It computes another program than those that were recorded.
        """
        turn, found = next((i, its) for i, its in enumerate(self._feed.cuts) if number in its.optimizers)
        window: list[dict[str, torch.Tensor]] = []
        if found.is_joined and backwards:
            backwards = [self._turns.joined(turn, backwards)]
        for backward in backwards:
            read = found.read(backward, self._last.get(turn))
            for value, root in zip(read.program.roots, found.roots, strict=True):
                if root.kind == "constant" and digest(read.tensors.get(value)) != root.name:
                    raise refused_at(
                        "a tensor was the same in all updates that were recorded", read.line, "port it anew"
                    )
            window.append(found.inputs(read).batch_of(read))
            self._last[turn] = backward
        groups = [group for i in found.optimizers for group in optimizers[i].param_groups]
        return self._feed.given(turn, window, groups) if window else []
