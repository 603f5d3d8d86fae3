"""Several optimizers that step after the same calls of `backward`, as those of an encoder and a decoder."""

from collections.abc import Iterable
from typing import Any

import torch


class Joint:
    """Optimizers of different parameters that update together.

    Args:
      parts: The optimizers, in the order in which they step.

    Attributes:
      parts: As given.
    """

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Update all parameters."""
        for part in self.parts:
            part.step()


def parts_of(optimizer: torch.optim.Optimizer | Joint) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that an update is made by."""
    return optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)


def owned(optimizer: torch.optim.Optimizer | Joint) -> set[int]:
    """Return the identities of the parameters of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
